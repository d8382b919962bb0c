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
    bit<16> window = 0;
    bit<16> count0 = 0;
    bit<16> count1 = 0;
    bit<16> count2 = 0;
    bit<16> missing0 = 0;
    bit<16> missing1 = 0;
    bit<16> missing2 = 0;
    bit<14> report_index = 0;
    bit<32> report = 0;
    bit<32> reported = 0;

#define ROW(n) \
    RegisterAction<heat_cell_t, bit<14>, bit<16>>(heat_row##n) count_row##n = { \
        void apply(inout heat_cell_t cell, out bit<16> count) { \
            if (cell.window == window) { \
                cell.count = cell.count |+| 1; \
            } else { \
                cell.count = 1; \
            } \
            cell.window = window; \
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
            last = report;
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

    action do_report() {
        reported = say_once.execute(report_index);
    }

    action not_hot() {
        reported = report;
    }

    @name(".heat_verdict")
    table heat_verdict {
        key = {
            missing0 : ternary @name("missing0");
            missing1 : ternary @name("missing1");
            missing2 : ternary @name("missing2");
        }
        actions = { do_report; not_hot; }
        const default_action = not_hot();
        const entries = { (0, 0, 0) : do_report(); }
    }

    action raise() {
        deparser.digest_type = HEAT_DIGEST;
    }

    apply {
        window = state.now[29:14];
        report[31:16] = 1;
        report[15:0] = state.now[29:14];
        // Two segments that share a cell take turns: the next window uses other bits.
        if (state.now[14:14] == 0) {
            report_index = state.hash[13:0];
        } else {
            report_index = state.hash[31:18];
        }
        count_all0();
        count_all1();
        count_all2();
        compare();
        heat_verdict.apply();
        state.heat_count[15:0] = min(state.heat_count[15:0], count2);
        if (reported != report) {
            raise();
        }
    }
}
