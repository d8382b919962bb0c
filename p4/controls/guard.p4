// Decides who may send what. `PortGuard`: a source address belongs to an ingress port, which also
// names the sender's bit in port sets. `NamespaceGuard`: which namespaces a port may read.
// `BucketOwner`: which ports may answer for a block. All run before anything that keeps state.

control PortGuard(in headers_t hdr, inout meta_t meta, in bit<9> ingress_port) {
    action admit(bit<32> port_bit, bit<16> serve_group) {
        meta.admitted = 1;
        meta.port_bit = port_bit;
        meta.serve_group = serve_group;
    }
    action reject() { meta.admitted = 0; }
    table port_guard {
        key = { ingress_port : exact; hdr.ipv4.src : exact; }
        actions = { admit; reject; }
        const default_action = reject();
        size = PORT_GUARD_ENTRIES;
    }
    apply { port_guard.apply(); }
}

control NamespaceGuard(in headers_t hdr, inout meta_t meta, in bit<9> ingress_port) {
    action allow() { }
    action refuse_namespace() { meta.admitted = 0; }
    table namespace_guard {
        key = { ingress_port : exact; hdr.kvcast.namespace : exact; }
        actions = { allow; refuse_namespace; }
        const default_action = refuse_namespace();
        size = NAMESPACE_GUARD_ENTRIES;
    }
    apply { namespace_guard.apply(); }
}

control BucketOwner(in headers_t hdr, inout meta_t meta, in bit<9> ingress_port) {
    action owner() { }
    action not_owner() { meta.admitted = 0; }
    table bucket_owner {
        key = { hdr.kvcast.key[BUCKET_BITS - 1:0] : exact @name("bucket"); ingress_port : exact; }
        actions = { owner; not_owner; }
        const default_action = not_owner();
        size = BUCKET_OWNER_ENTRIES;
    }
    apply { bucket_owner.apply(); }
}
