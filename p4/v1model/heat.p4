// v1model: how often a segment is read that SRAM does not serve. A count-min sketch of three rows;
// a counter is {window, count}, so that a new window needs no sweep, and one more array remembers
// the window in which a segment was last reported: one digest a window. A window is 2^14 ticks, about
// one second. Needs no access from the control plane.

control Heat(in headers_t hdr, inout meta_t meta) {
    register<bit<32>>(HEAT_COUNTERS) heat_row0;     // window 16, count 16
    register<bit<32>>(HEAT_COUNTERS) heat_row1;
    register<bit<32>>(HEAT_COUNTERS) heat_row2;
    register<bit<32>>(HEAT_COUNTERS) heat_reported; // window in which it was reported, plus one
    bit<32> index0 = 0;
    bit<32> index1 = 0;
    bit<32> index2 = 0;
    bit<32> count0 = 0;
    bit<32> count1 = 0;
    bit<32> count2 = 0;
    bit<32> window = 0;
    bit<32> reported = 0;

    apply {
        window = (bit<32>)meta.now[29:14];
        // Three rows from two hashes that the pending table has made already (Kirsch and
        // Mitzenmacher, 2006).
        index0 = (bit<32>)meta.fingerprint[14:1];
        index1 = (bit<32>)meta.fingerprint[30:17];
        index2 = (bit<32>)meta.pending_index[13:0];
        heat_row0.read(count0, index0);
        heat_row1.read(count1, index1);
        heat_row2.read(count2, index2);
        if (count0[31:16] != window[15:0]) { count0 = window << 16; }
        if (count1[31:16] != window[15:0]) { count1 = window << 16; }
        if (count2[31:16] != window[15:0]) { count2 = window << 16; }
        if (count0[15:0] != 0xffff) { count0 = count0 + 1; }
        if (count1[15:0] != 0xffff) { count1 = count1 + 1; }
        if (count2[15:0] != 0xffff) { count2 = count2 + 1; }
        heat_row0.write(index0, count0);
        heat_row1.write(index1, count1);
        heat_row2.write(index2, count2);
        count0 = count0 & 0xffff;
        if (count1 & 0xffff < count0) { count0 = count1 & 0xffff; }
        if (count2 & 0xffff < count0) { count0 = count2 & 0xffff; }
        if (meta.heat_threshold != 0 && count0 >= meta.heat_threshold) {
            heat_reported.read(reported, index0);
            if (reported != window + 1) {
                heat_reported.write(index0, window + 1);
                digest<heat_t>(1, { hdr.kvcast.namespace, hdr.kvcast.segment, hdr.kvcast.key,
                                    meta.waiting | meta.reader_bits, meta.port_bit, count0 });
            }
        }
    }
}
