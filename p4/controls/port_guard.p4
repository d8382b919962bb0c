// Finds out who may speak kvcast on a port: a frame's source address must be bound to the port that
// it came in by; a READ's namespace must be allowed there; and only a port that owns the key's
// bucket may answer. Gate judges by it.

control PortGuard(inout headers_t hdr, inout state_t state, in bit<9> ingress_port) {
    // port_bit: this port in bitmaps. serve_group: multicast group {port, recirculation}, 0 = none.
    @name(".admit")
    action admit(bit<32> port_bit, bit<16> serve_group) {
        state.admitted = 1;
        state.reader_bit = port_bit;
        state.port_bits = port_bit;
        state.serve_group = serve_group;
    }

    @name(".reject")
    action reject() { }

    @name(".allow")
    action allow() {
        state.permitted = 1;
    }

    @name(".owner")
    action owner() {
        state.permitted = 1;
    }

    @name(".not_owner")
    action not_owner() { }

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

    @name(".bucket_owner")
    table bucket_owner {
        key = {
            hdr.kvcast.key[BUCKET_BITS-1:0] : exact @name("bucket");
            ingress_port                    : exact @name("ingress_port");
        }
        actions = { owner; not_owner; }
        const default_action = not_owner();
        size = OWNED_BUCKETS;
    }

    apply {
        // No lookup waits for another: on a Tofino they share a stage.
        port_guard.apply();
        if (hdr.kvcast.op == OP_READ) {
            namespace_guard.apply();
        } else {
            bucket_owner.apply();
        }
    }
}
