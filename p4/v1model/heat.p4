// Tells the controller, once a window, of a segment that is read often. A count-min sketch of three
// rows counts READs that switch memory did not answer; when the least of the three counts reaches the
// threshold, a digest goes to the controller. A word carries the window in which it was last used, so
// nothing ever needs clearing. Runs after Pending, on READs that show demand (a repeat does not).

control Heat(inout headers_t hdr, inout local_metadata_t local_metadata) {
    register<bit<32>>(HEAT_CELLS) heat_row0;       // [31:16] window, [15:0] count, saturating
    register<bit<32>>(HEAT_CELLS) heat_row1;
    register<bit<32>>(HEAT_CELLS) heat_row2;
    register<bit<32>>(HEAT_CELLS) heat_reported;   // [16] used, [15:0] window of the last digest
    bit<16> window = 0;
    bit<32> index0 = 0;
    bit<32> index1 = 0;
    bit<32> index2 = 0;
    bit<16> other_hash = 0;
    bit<32> word0 = 0;
    bit<32> word1 = 0;
    bit<32> word2 = 0;
    bit<16> count = 0;
    bit<32> report_index = 0;
    bit<32> reported = 0;
    heat_t message;

    apply {
        window = (bit<16>)(local_metadata.now >> HEAT_WINDOW_SHIFT);
        hash(other_hash, HashAlgorithm.crc16, 16w0,
             { hdr.kvcast.namespace, hdr.kvcast.key, hdr.kvcast.segment }, 32w0x10000);
        index0 = (bit<32>)local_metadata.hash[13:0];
        index1 = (bit<32>)local_metadata.hash[29:16];
        index2 = (bit<32>)other_hash[13:0];
        @atomic {
            heat_row0.read(word0, index0);
            heat_row1.read(word1, index1);
            heat_row2.read(word2, index2);
            if (word0[31:16] != window) { word0 = window ++ 16w0; }
            if (word1[31:16] != window) { word1 = window ++ 16w0; }
            if (word2[31:16] != window) { word2 = window ++ 16w0; }
            word0[15:0] = word0[15:0] |+| 1;
            word1[15:0] = word1[15:0] |+| 1;
            word2[15:0] = word2[15:0] |+| 1;
            heat_row0.write(index0, word0);
            heat_row1.write(index1, word1);
            heat_row2.write(index2, word2);
        }
        count = word0[15:0];
        if (word1[15:0] < count) { count = word1[15:0]; }
        if (word2[15:0] < count) { count = word2[15:0]; }
        if ((bit<32>)count >= local_metadata.heat_threshold) {
            // Two segments that share a cell take turns: the next window uses other bits.
            if (window[0:0] == 0) {
                report_index = (bit<32>)(local_metadata.hash[13:0]);
            } else {
                report_index = (bit<32>)(local_metadata.hash[31:18]);
            }
            @atomic {
                heat_reported.read(reported, report_index);
                heat_reported.write(report_index, 16w1 ++ window);
            }
            if (reported != 16w1 ++ window) {
                message.namespace = hdr.kvcast.namespace;
                message.segment = hdr.kvcast.segment;
                message.key = hdr.kvcast.key;
                message.port_bits = local_metadata.entry.ports;
                if (local_metadata.decision == DECISION_COLLIDE) {
                    message.port_bits = local_metadata.port_bits;
                }
                message.reader_bit = local_metadata.reader_bit;
                message.count = (bit<32>)count;
                digest<heat_t>(1, message);
            }
        }
    }
}
