// Which chunks of a slot are stored: two words a slot, for chunks 0 to 31 and 32 to 63. Each word
// holds the generation under which its chunks were stored; a word of another generation reads as
// empty, so nobody need clear a slot before its next use. A READ reads both words; DATA that fills
// adds its chunk.

control SlotValidity(inout local_metadata_t local_metadata) {
    register<bit<64>>(SLOTS) valid_low;    // [63:32] generation, [31:0] bit i: chunk i
    register<bit<64>>(SLOTS) valid_high;   // [63:32] generation, [31:0] bit i: chunk 32 + i
    bit<64> low = 0;
    bit<64> high = 0;

    apply {
        @atomic {
            valid_low.read(low, local_metadata.slot);
            valid_high.read(high, local_metadata.slot);
            if (low[63:32] != local_metadata.generation) {
                low = local_metadata.generation ++ 32w0;
            }
            if (high[63:32] != local_metadata.generation) {
                high = local_metadata.generation ++ 32w0;
            }
            if (local_metadata.fill == FILL_FILLED) {
                low = low | (32w0 ++ local_metadata.fill_bit[31:0]);
                high = high | (32w0 ++ local_metadata.fill_bit[63:32]);
                valid_low.write(local_metadata.slot, low);
                valid_high.write(local_metadata.slot, high);
            }
        }
        local_metadata.valid = high[31:0] ++ low[31:0];
    }
}
