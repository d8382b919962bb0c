// Tells the controller, once a window, of a segment that is read often (v1model/heat.p4 says more).
// The same sketch: three rows in dual stateful ALUs of 16 bits each half. A count reaches the
// threshold when the threshold minus it, cut at 0, is 0.

struct heat_cell_t {
    bit<16> window;
    bit<16> count;          // saturating
}

control Heat(inout headers_t hdr, inout local_metadata_t local_metadata,
             inout ingress_intrinsic_metadata_for_deparser_t deparser) {
    Register<heat_cell_t, bit<14>>(HEAT_CELLS) heat_row0;
    Register<heat_cell_t, bit<14>>(HEAT_CELLS) heat_row1;
    Register<heat_cell_t, bit<14>>(HEAT_CELLS) heat_row2;
    Register<bit<16>, bit<14>>(HEAT_CELLS) heat_reported;  // [15] used, [14:0] window of the last digest
    bit<16> count0 = 0;
    bit<16> count1 = 0;
    bit<16> count2 = 0;
    bit<16> missing0 = 0;
    bit<16> missing1 = 0;
    bit<16> missing2 = 0;
    bit<16> reported = 0;

#define ROW(n) \
    RegisterAction<heat_cell_t, bit<14>, bit<16>>(heat_row##n) count_row##n = { \
        void apply(inout heat_cell_t cell, out bit<16> count) { \
            if (cell.window == local_metadata.heat_window) { \
                cell.count = cell.count |+| 1; \
            } else { \
                cell.count = 1; \
            } \
            cell.window = local_metadata.heat_window; \
            count = cell.count; \
        } \
    };
    ROW(0)
    ROW(1)
    ROW(2)
#undef ROW

    RegisterAction<bit<16>, bit<14>, bit<16>>(heat_reported) say_once = {
        void apply(inout bit<16> last, out bit<16> before) {
            before = last;
            last = local_metadata.heat_report;
        }
    };

    // READs that switch memory did not answer, but for a repeat that found its entry.
#define COUNT(n, index) \
    action do_count_row##n() { count##n = count_row##n.execute(index); } \
    @hidden \
    table count##n##_step { \
        key = { \
            local_metadata.heat_on : exact; \
            local_metadata.kind    : exact; \
            local_metadata.match   : ternary; \
            hdr.kvcast.flags       : ternary; \
        } \
        actions = { do_count_row##n; @defaultonly NoAction; } \
        const default_action = NoAction(); \
        const entries = { \
            (1, KIND_READ, OTHER_FRESH, _)                 : do_count_row##n(); \
            (1, KIND_READ, OTHER_STALE, _)                 : do_count_row##n(); \
            (1, KIND_READ, MINE_FRESH,  0 &&& FLAG_RETRY)  : do_count_row##n(); \
            (1, KIND_READ, MINE_STALE,  0 &&& FLAG_RETRY)  : do_count_row##n(); \
        } \
        size = 4; \
    }
    COUNT(0, local_metadata.index[13:0])
    COUNT(1, local_metadata.print[13:0])
    COUNT(2, local_metadata.other_hash[13:0])
#undef COUNT

    action compare() {
        missing0 = local_metadata.heat_threshold[15:0] |-| count0;
        missing1 = local_metadata.heat_threshold[15:0] |-| count1;
        missing2 = local_metadata.heat_threshold[15:0] |-| count2;
        local_metadata.heat_count[15:0] = min(count0, count1);
    }

    action not_hot() {
        reported = local_metadata.heat_report;
    }

    // Two segments that share a cell take turns: the next window uses other bits.
#define VERDICT(parity, index) \
    action report_##parity() { reported = say_once.execute(index); } \
    @hidden \
    table heat_verdict_##parity { \
        key = { \
            local_metadata.heat_on : exact; \
            missing0               : ternary; \
            missing1               : ternary; \
            missing2               : ternary; \
        } \
        actions = { report_##parity; not_hot; } \
        const default_action = not_hot(); \
        const entries = { (1, 0, 0, 0) : report_##parity(); } \
        size = 1; \
    }
    VERDICT(even, local_metadata.index[13:0])
    VERDICT(odd, local_metadata.print[13:0])
#undef VERDICT

    action finish_count() {
        local_metadata.heat_count[15:0] = min(local_metadata.heat_count[15:0], count2);
    }

    action raise() {
        deparser.digest_type = HEAT_DIGEST;
    }

    // Who waits for the segment now, this reader included.
    action take_waiting() {
        local_metadata.heat_ports = local_metadata.waiting;
    }

    action take_own() {
        local_metadata.heat_ports = local_metadata.port_bits;
    }

    @name(".heat_ports")
    table heat_ports {
        key = { local_metadata.match : exact @name("match"); }
        actions = { take_waiting; take_own; }
        const default_action = take_own();
        const entries = {
            MINE_FRESH : take_waiting();
            MINE_STALE : take_waiting();
        }
        size = 2;
    }

    // What is not counted has a count of 0, which reaches no threshold: heat_on says that it is not 0.
    apply {
        count0_step.apply();
        count1_step.apply();
        count2_step.apply();
        heat_ports.apply();
        compare();
        finish_count();
        if (local_metadata.heat_window[0:0] == 0) {
            heat_verdict_even.apply();
        } else {
            heat_verdict_odd.apply();
        }
        if (reported != local_metadata.heat_report) {
            raise();
        }
    }
}

// The window of the sketch, and whether there is a threshold that a count can reach.
control HeatWindow(inout local_metadata_t local_metadata) {
    // Bits out of the middle of a word come by the hash unit, which does not mind where they lie.
    Hash<bit<16>>(HashAlgorithm_t.IDENTITY) window;
    Hash<bit<16>>(HashAlgorithm_t.IDENTITY) report;

    action tell_window() {
        local_metadata.heat_window = window.get({ local_metadata.now[29:14] });
    }

    action tell_report() {
        local_metadata.heat_report = report.get({ 1w1, local_metadata.now[28:14] });
    }

    apply {
        tell_window();
        tell_report();
        if (local_metadata.heat_threshold[31:16] == 0 && local_metadata.heat_threshold[15:0] != 0) {
            local_metadata.heat_on = 1;
        }
    }
}
