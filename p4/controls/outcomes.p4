// Counts every packet's fate, and every fill, where the control plane can read it.

control Outcomes(in meta_t meta) {
    direct_counter(CounterType.packets_and_bytes) decided;
    direct_counter(CounterType.packets_and_bytes) filled;
    action count_decision() { decided.count(); }
    action count_fill() { filled.count(); }
    table decisions {
        key = { meta.decision : exact; }
        actions = { count_decision; }
        const default_action = count_decision();
        const entries = {
            DECIDE_HIT : count_decision();
            DECIDE_JOIN : count_decision();
            DECIDE_NEW : count_decision();
            DECIDE_COLLIDE : count_decision();
            DECIDE_EXPIRED : count_decision();
            DECIDE_RETRY : count_decision();
            DECIDE_PARTIAL : count_decision();
            DECIDE_SHARED : count_decision();
            DECIDE_UNICAST : count_decision();
            DECIDE_GUARDED : count_decision();
            DECIDE_DROPPED : count_decision();
            DECIDE_FORWARDED : count_decision();
            DECIDE_SERVING : count_decision();
        }
        counters = decided;
        size = 16;
    }
    table fills {
        key = { meta.fill : exact; }
        actions = { count_fill; }
        const default_action = count_fill();
        const entries = {
            FILL_FILLED : count_fill();
            FILL_WRONG_DIGEST : count_fill();
            FILL_NO_CHUNK : count_fill();
        }
        counters = filled;
        size = 4;
    }
    apply {
        decisions.apply();
        if (meta.fill != FILL_NONE) { fills.apply(); }
    }
}
