// Turns what Forwarding found into a decision. A kvcast frame needs a single known destination. A
// READ without one is dropped before it can open a pending entry that nobody would answer; an answer
// without one may still reach others who wait. Runs after Forwarding, on frames that have no decision
// yet.

control Route(inout local_metadata_t local_metadata) {
    action drop_read() {
        local_metadata.coalesces = 0;
        local_metadata.decision = DECISION_DROPPED;
        local_metadata.delivery = DELIVER_NOWHERE;
    }

    action drop() {
        local_metadata.decision = DECISION_DROPPED;
        local_metadata.delivery = DELIVER_NOWHERE;
    }

    action decide(bit<8> decision) {
        local_metadata.decision = decision;
    }

    @name(".route")
    table route {
        key = {
            local_metadata.kind      : ternary @name("kind");
            local_metadata.is_answer : ternary @name("is_answer");
            local_metadata.out_bit   : ternary @name("out_bit");
            local_metadata.delivery  : ternary @name("delivery");
        }
        actions = { drop_read; drop; decide; }
        const default_action = drop_read();
        const entries = {
            (KIND_ORDINARY,     _, _, DELIVER_NOWHERE) : drop();
            (KIND_ORDINARY,     _, _, _)               : decide(DECISION_FORWARDED);
            (KIND_WRITE,        _, _, _)               : drop();     // but for those who wait
            (_,                 1, 0, _)               : drop();
            (_,                 1, _, _)               : decide(DECISION_UNICAST);
            (_,                 0, 0, _)               : drop_read();
            (KIND_PARTIAL_READ, 0, _, _)               : decide(DECISION_PARTIAL);
            (_,                 0, _, _)               : decide(DECISION_NEW);   // Coalescing may change it
        }
    }

    apply {
        route.apply();
    }
}
