// Switch memory itself: a cell is one chunk, in four arrays of the widest word that p4c takes. Slot
// and chunk, side by side, are the cell's index. A chunk that passes is stored, or a READ that is
// being served gets one attached; never both in one packet.

control Cells(inout headers_t hdr, inout local_metadata_t local_metadata) {
    register<bit<2048>>(CELLS) cell_w0;
    register<bit<2048>>(CELLS) cell_w1;
    register<bit<2048>>(CELLS) cell_w2;
    register<bit<2048>>(CELLS) cell_w3;
    bit<32> index = 0;

    apply {
        index = local_metadata.slot[25:0] ++ hdr.kvcast.chunk[5:0];
        if (local_metadata.serving == 1) {
            hdr.cell.setValid();
            cell_w0.read(hdr.cell.w0, index);
            cell_w1.read(hdr.cell.w1, index);
            cell_w2.read(hdr.cell.w2, index);
            cell_w3.read(hdr.cell.w3, index);
        } else if (local_metadata.fill == FILL_FILLED) {
            cell_w0.write(index, hdr.cell.w0);
            cell_w1.write(index, hdr.cell.w1);
            cell_w2.write(index, hdr.cell.w2);
            cell_w3.write(index, hdr.cell.w3);
        }
    }
}
