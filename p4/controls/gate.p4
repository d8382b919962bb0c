// Decides whether a frame takes part in kvcast. Ordinary traffic does not; nor does any frame while
// the switch is told to be a plain one. A malformed frame, and one from a source, namespace or bucket
// that its port may not use, is refused; so is RDMA to a landing zone that is not a home's WRITE for
// whoever waits. Runs after FrameClass and PortGuard, and before anything
// that reads or changes shared state; not again for a frame that comes round.

control Gate(inout local_metadata_t local_metadata) {
    action plain() {
        local_metadata.kind = KIND_ORDINARY;
        local_metadata.is_answer = 0;
        local_metadata.has_memory = 0;
        local_metadata.coalesces = 0;
    }

    action refuse(bit<8> decision) {
        local_metadata.refused = 1;
        local_metadata.decision = decision;
        local_metadata.has_memory = 0;
        local_metadata.coalesces = 0;
    }

    action accept() { }

    @name(".gate")
    table gate {
        key = {
            local_metadata.enabled   : ternary @name("enabled");
            local_metadata.broken    : ternary @name("broken");
            local_metadata.kind      : ternary @name("kind");
            local_metadata.admitted  : ternary @name("admitted");
            local_metadata.permitted : ternary @name("permitted");
            local_metadata.formed    : ternary @name("formed");
        }
        actions = { plain; refuse; accept; }
        const default_action = refuse(DECISION_GUARDED);
        const entries = {
            (0, _, _,              _, _, _) : plain();
            (_, 1, _,              _, _, _) : refuse(DECISION_DROPPED);
            (_, _, KIND_ORDINARY,  _, _, _) : plain();
            (_, _, KIND_MALFORMED, _, _, _) : refuse(DECISION_DROPPED);
            (_, _, KIND_WRITE,     1, _, 1) : accept();
            (_, _, KIND_WRITE,     _, _, _) : refuse(DECISION_GUARDED);
            (_, _, KIND_TO_ZONE,   _, _, _) : refuse(DECISION_GUARDED);
            (_, _, _,              1, 1, _) : accept();
        }
    }

    apply {
        gate.apply();
    }
}
