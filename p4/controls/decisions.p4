// Counts what became of each frame, once a pass, at the end of ingress. Decides nothing.

control Decisions(inout local_metadata_t local_metadata) {
    DIRECT_COUNTER(decision_counts);

    @name(".count_decision")
    action count_decision() {
        decision_counts.count();
    }

    @name(".decisions")
    table decisions {
        key = { local_metadata.decision : exact @name("decision"); }
        actions = { count_decision; @defaultonly NoAction; }
        const default_action = NoAction();
        counters = decision_counts;
        const entries = {
            DECISION_HIT       : count_decision();
            DECISION_JOIN      : count_decision();
            DECISION_NEW       : count_decision();
            DECISION_COLLIDE   : count_decision();
            DECISION_EXPIRED   : count_decision();
            DECISION_RETRY     : count_decision();
            DECISION_PARTIAL   : count_decision();
            DECISION_SHARED    : count_decision();
            DECISION_UNICAST   : count_decision();
            DECISION_GUARDED   : count_decision();
            DECISION_DROPPED   : count_decision();
            DECISION_FORWARDED : count_decision();
            DECISION_SERVING   : count_decision();
        }
    }

    apply {
        decisions.apply();
    }
}
