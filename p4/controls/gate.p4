// Decides whether a frame takes part in kvcast: an ordinary one does not, nor does any while the
// switch is told to be a plain one; what is malformed, or comes from where it may not, is refused.
// Runs after FrameClass and PortGuard, and before anything that reads or changes shared state; not
// again for a frame that comes round.

control Gate(inout state_t state) {
    action plain() {
        state.kind = KIND_ORDINARY;
        state.is_answer = 0;
        state.has_memory = 0;
        state.coalesces = 0;
    }

    action refuse(bit<8> decision) {
        state.refused = 1;
        state.decision = decision;
        state.has_memory = 0;
        state.coalesces = 0;
    }

    action accept() { }

    @name(".gate")
    table gate {
        key = {
            state.enabled   : ternary @name("enabled");
            state.broken    : ternary @name("broken");
            state.kind      : ternary @name("kind");
            state.admitted  : ternary @name("admitted");
            state.permitted : ternary @name("permitted");
        }
        actions = { plain; refuse; accept; }
        const default_action = refuse(DECISION_GUARDED);
        const entries = {
            (0, _, _,              _, _) : plain();
            (_, 1, _,              _, _) : refuse(DECISION_DROPPED);
            (_, _, KIND_ORDINARY,  _, _) : plain();
            (_, _, KIND_MALFORMED, _, _) : refuse(DECISION_DROPPED);
            (_, _, _,              1, 1) : accept();
        }
    }

    apply {
        gate.apply();
    }
}
