// Tells the controller, once a window, of a segment that is read often (v1model/heat.p4 says more).
// The same sketch: three rows in dual stateful ALUs of 16 bits each half. A count reaches the
// threshold when the threshold minus it, cut at 0, is 0.

const bit<3> HEAT_DIGEST = 1;

struct heat_cell_t {
    bit<16> window;
    bit<16> count;          // saturating
}

control Heat(inout headers_t hdr, inout state_t state,
             inout ingress_intrinsic_metadata_for_deparser_t deparser) {
    Register<heat_cell_t, bit<14>>(HEAT_CELLS) heat_row0;
    Register<heat_cell_t, bit<14>>(HEAT_CELLS) heat_row1;
    Register<heat_cell_t, bit<14>>(HEAT_CELLS) heat_row2;
    Register<bit<32>, bit<14>>(HEAT_CELLS) heat_reported;  // [16] used, [15:0] window of the last digest
    bit<16> count0 = 0;
    bit<16> count1 = 0;
    bit<16> count2 = 0;
    bit<16> missing0 = 0;
    bit<16> missing1 = 0;
    bit<16> missing2 = 0;
    bit<32> reported = 0;
    bit<1> demand = 0;

#define ROW(n) \
    RegisterAction<heat_cell_t, bit<14>, bit<16>>(heat_row##n) count_row##n = { \
        void apply(inout heat_cell_t cell, out bit<16> count) { \
            if (cell.window == state.heat_window) { \
                cell.count = cell.count |+| 1; \
            } else { \
                cell.count = 1; \
            } \
            cell.window = state.heat_window; \
            count = cell.count; \
        } \
    };
    ROW(0)
    ROW(1)
    ROW(2)
#undef ROW

    RegisterAction<bit<32>, bit<14>, bit<32>>(heat_reported) say_once = {
        void apply(inout bit<32> last, out bit<32> before) {
            before = last;
            last = state.heat_report;
        }
    };

    action count_all0() { count0 = count_row0.execute(state.hash[13:0]); }
    action count_all1() { count1 = count_row1.execute(state.hash[29:16]); }
    action count_all2() { count2 = count_row2.execute(state.other_hash[13:0]); }

    action compare() {
        missing0 = state.heat_threshold[15:0] |-| count0;
        missing1 = state.heat_threshold[15:0] |-| count1;
        missing2 = state.heat_threshold[15:0] |-| count2;
        state.heat_count[15:0] = min(count0, count1);
    }

    action not_hot() {
        reported = state.heat_report;
    }

    // Two segments that share a cell take turns: the next window uses other bits.
#define VERDICT(parity, index) \
    action report_##parity() { reported = say_once.execute(index); } \
    @hidden \
    table heat_verdict_##parity { \
        key = { missing0 : ternary; missing1 : ternary; missing2 : ternary; } \
        actions = { report_##parity; not_hot; } \
        const default_action = not_hot(); \
        const entries = { (0, 0, 0) : report_##parity(); } \
        size = 1; \
    }
    VERDICT(even, state.hash[13:0])
    VERDICT(odd, state.hash[31:18])
#undef VERDICT

    action finish_count() {
        state.heat_count[15:0] = min(state.heat_count[15:0], count2);
    }

    action raise() {
        deparser.digest_type = HEAT_DIGEST;
    }

    // Who waits for the segment now, this reader included.
    action take_waiting() {
        state.heat_ports = state.waiting;
    }

    action take_own() {
        state.heat_ports = state.port_bits;
    }

    @name(".heat_ports")
    table heat_ports {
        key = { state.match : exact @name("match"); }
        actions = { take_waiting; take_own; }
        const default_action = take_own();
        const entries = {
            MINE_FRESH : take_waiting();
            MINE_STALE : take_waiting();
        }
        size = 2;
    }

    // READs that switch memory did not answer, but for a repeat that found its entry.
    action show_demand() {
        demand = 1;
    }

    action no_demand() { }

    @hidden
    table demands {
        key = {
            state.kind       : exact;
            state.match      : ternary;
            hdr.kvcast.flags : ternary;
            state.heat_on    : exact;
        }
        actions = { show_demand; no_demand; }
        const default_action = no_demand();
        const entries = {
            (KIND_READ, 0,           _,                         1) : no_demand();
            (KIND_READ, OTHER_FRESH, _,                         1) : show_demand();
            (KIND_READ, OTHER_STALE, _,                         1) : show_demand();
            (KIND_READ, _,           FLAG_RETRY &&& FLAG_RETRY, 1) : no_demand();
            (KIND_READ, _,           _,                         1) : show_demand();
        }
        size = 8;
    }

    apply {
        demands.apply();
        heat_ports.apply();
        if (demand == 1) { count_all0(); }
        if (demand == 1) { count_all1(); }
        if (demand == 1) { count_all2(); }
        compare();
        finish_count();
        if (demand == 1) {
            if (state.heat_window[0:0] == 0) {
                heat_verdict_even.apply();
            } else {
                heat_verdict_odd.apply();
            }
        }
        if (demand == 1 && reported != state.heat_report) {
            raise();
        }
    }
}

// The window of the sketch, and whether there is a threshold that a count can reach.
control HeatWindow(inout state_t state) {
    action tell_window() {
        state.heat_window = state.now[29:14];
        state.heat_report[31:16] = 1;
        state.heat_report[15:0] = state.now[29:14];
    }

    apply {
        tell_window();
        if (state.heat_threshold[31:16] == 0 && state.heat_threshold[15:0] != 0) {
            state.heat_on = 1;
        }
    }
}
