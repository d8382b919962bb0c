// What forwarding means for a frame. A kvcast frame needs a single known destination: a READ without
// one is dropped before it could open an entry that nobody will answer; an answer without one may
// still reach others who wait. Runs after Forwarding, on frames that nothing else was decided of.

control Route(inout state_t state) {
    action drop_read() {
        state.coalesces = 0;
        state.decision = DECISION_DROPPED;
        state.delivery = DELIVER_NOWHERE;
    }

    action drop() {
        state.decision = DECISION_DROPPED;
        state.delivery = DELIVER_NOWHERE;
    }

    action decide(bit<8> decision) {
        state.decision = decision;
    }

    @name(".route")
    table route {
        key = {
            state.kind      : ternary @name("kind");
            state.is_answer : ternary @name("is_answer");
            state.out_bit   : ternary @name("out_bit");
            state.delivery  : ternary @name("delivery");
        }
        actions = { drop_read; drop; decide; }
        const default_action = drop_read();
        const entries = {
            (KIND_ORDINARY,     _, _, DELIVER_NOWHERE) : drop();
            (KIND_ORDINARY,     _, _, _)               : decide(DECISION_FORWARDED);
            (_,                 1, 0, _)               : drop();
            (_,                 1, _, _)               : decide(DECISION_UNICAST);
            (_,                 0, 0, _)               : drop_read();
            (KIND_PARTIAL_READ, 0, _, _)               : decide(DECISION_PARTIAL);
            (_,                 0, _, _)               : decide(DECISION_NEW);   // Coalescing has the last word
        }
    }

    apply {
        route.apply();
    }
}
