// v1model: the resident tier's registers. A slot holds a segment: 64 cells of 1 KiB, each four words
// of 2048 bits (the widest that p4c takes), and 64 validity bits under the slot's generation. A slot
// taken over under a new generation has no valid chunk until DATA passes.

control SlotValidity(in headers_t hdr, inout meta_t meta) {
    register<bit<32>>(SLOTS) slot_generation;   // of the validity bits
    register<bit<32>>(SLOTS) slot_valid_low;    // chunks 0 to 31
    register<bit<32>>(SLOTS) slot_valid_high;   // chunks 32 to 63
    bit<32> generation = 0;
    bit<32> low = 0;
    bit<32> high = 0;

    apply {
        @atomic {
            slot_generation.read(generation, meta.slot);
            slot_valid_low.read(low, meta.slot);
            slot_valid_high.read(high, meta.slot);
            if (generation != meta.generation) {
                low = 0;
                high = 0;
            }
            if (meta.fill == FILL_FILLED) {
                low = low | meta.chunk_bit[31:0];
                high = high | meta.chunk_bit[63:32];
                slot_generation.write(meta.slot, meta.generation);
                slot_valid_low.write(meta.slot, low);
                slot_valid_high.write(meta.slot, high);
            }
        }
        meta.valid = high ++ low;
    }
}

control Cells(inout headers_t hdr, in meta_t meta) {
    register<bit<2048>>(CELLS) cell_w0;
    register<bit<2048>>(CELLS) cell_w1;
    register<bit<2048>>(CELLS) cell_w2;
    register<bit<2048>>(CELLS) cell_w3;
    bit<32> index = 0;

    apply {
        index = meta.slot << 6 | (bit<32>)hdr.kvcast.chunk;
        if (meta.fill == FILL_FILLED) {
            cell_w0.write(index, hdr.cell.w0);
            cell_w1.write(index, hdr.cell.w1);
            cell_w2.write(index, hdr.cell.w2);
            cell_w3.write(index, hdr.cell.w3);
        } else {
            hdr.cell.setValid();
            cell_w0.read(hdr.cell.w0, index);
            cell_w1.read(hdr.cell.w1, index);
            cell_w2.read(hdr.cell.w2, index);
            cell_w3.read(hdr.cell.w3, index);
        }
    }
}
