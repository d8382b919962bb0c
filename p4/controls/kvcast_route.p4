// What forwarding means for a kvcast frame: it needs a single known destination. A READ without one
// is dropped before it could open an entry that nobody will answer; an answer without one may still
// reach others who wait. Runs after Forwarding.

control KvcastRoute(inout state_t state) {
    action unroutable_read() {
        state.coalesces = 0;
        state.decision = DECISION_DROPPED;
        state.delivery = DELIVER_NOWHERE;
    }

    action unroutable_answer() {
        state.decision = DECISION_DROPPED;
        state.delivery = DELIVER_NOWHERE;
    }

    action routed(bit<8> decision) {
        state.decision = decision;
    }

    @name(".kvcast_route")
    table kvcast_route {
        key = {
            state.is_answer : exact   @name("is_answer");
            state.kind      : ternary @name("kind");
            state.out_bit   : ternary @name("out_bit");
        }
        actions = { unroutable_read; unroutable_answer; routed; }
        const default_action = unroutable_read();
        const entries = {
            (1, _,                 0) : unroutable_answer();
            (1, _,                 _) : routed(DECISION_UNICAST);
            (0, _,                 0) : unroutable_read();
            (0, KIND_PARTIAL_READ, _) : routed(DECISION_PARTIAL);
            (0, _,                 _) : routed(DECISION_NEW);   // Coalescing has the last word
        }
    }

    apply {
        kvcast_route.apply();
    }
}
