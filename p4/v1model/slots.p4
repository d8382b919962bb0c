// Which chunks of a slot are stored: two words a slot, for chunks 0 to 31 and 32 to 63, each tagged
// with the generation under which they were stored, so that nobody need clear a slot before its
// next use. A word of another generation reads as empty. Read by READs, read and widened by DATA
// that fills, once a packet. The tagged word is what a Tofino keeps in one dual ALU.

control SlotValidity(inout state_t state) {
    register<bit<64>>(SLOTS) valid_low;    // [63:32] generation, [31:0] bit i: chunk i
    register<bit<64>>(SLOTS) valid_high;   // [63:32] generation, [31:0] bit i: chunk 32 + i
    bit<64> low = 0;
    bit<64> high = 0;

    apply {
        @atomic {
            valid_low.read(low, state.slot);
            valid_high.read(high, state.slot);
            if (low[63:32] != state.generation) {
                low = state.generation ++ 32w0;
            }
            if (high[63:32] != state.generation) {
                high = state.generation ++ 32w0;
            }
            if (state.fill == FILL_FILLED) {
                low = low | (32w0 ++ state.fill_bit[31:0]);
                high = high | (32w0 ++ state.fill_bit[63:32]);
                valid_low.write(state.slot, low);
                valid_high.write(state.slot, high);
            }
        }
        state.valid = high[31:0] ++ low[31:0];
    }
}
