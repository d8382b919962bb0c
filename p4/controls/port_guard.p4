// Finds out who may speak kvcast on a port. A frame's source address must be bound to the port by
// which it came in; a READ's namespace must be allowed there; and only the port of a home of the
// key's bucket may answer. Gate decides by what is found here.

control PortGuard(inout headers_t hdr, inout local_metadata_t local_metadata, in bit<9> ingress_port) {
    // port_bit: this port in bitmaps. serve_group: multicast group {port, recirculation}, 0 = none.
    @name(".admit")
    action admit(bit<32> port_bit, bit<16> serve_group) {
        local_metadata.admitted = 1;
        local_metadata.reader_bit = port_bit;
        local_metadata.port_bits = port_bit;
        local_metadata.serve_group = serve_group;
    }

    @name(".reject")
    action reject() { }

    @name(".allow")
    action allow() {
        local_metadata.permitted = 1;
    }

    @name(".home")
    action home() {
        local_metadata.permitted = 1;
    }

    @name(".not_home")
    action not_home() { }

    @name(".port_guard")
    table port_guard {
        key = {
            ingress_port : exact @name("ingress_port");
            hdr.ipv4.src : exact;
        }
        actions = { admit; reject; }
        const default_action = reject();
        size = GUARDED_SOURCES;
    }

    @name(".namespace_guard")
    table namespace_guard {
        key = {
            ingress_port         : exact @name("ingress_port");
            hdr.kvcast.namespace : exact @name("namespace");
        }
        actions = { allow; reject; }
        const default_action = reject();
        size = GUARDED_NAMESPACES;
    }

    @name(".bucket_home")
    table bucket_home {
        key = {
            hdr.kvcast.key[BUCKET_BITS-1:0] : exact @name("bucket");
            ingress_port                    : exact @name("ingress_port");
        }
        actions = { home; not_home; }
        const default_action = not_home();
        size = BUCKET_HOMES;
    }

    apply {
        // No lookup waits for another: on a Tofino they share a stage.
        port_guard.apply();
        if (hdr.kvcast.op == OP_READ) {
            namespace_guard.apply();
        } else {
            bucket_home.apply();
        }
    }
}
