// Decides whether SRAM can answer a READ, and whether DATA belongs into SRAM. Both run after the
// resident lookup. `FillDecision` must run before the slot's validity is read, since a fill sets a
// bit there; `ServeDecision` after it.

control FillDecision(in headers_t hdr, inout meta_t meta) {
    ChunkBit() chunk_bit_of;

    apply {
        chunk_bit_of.apply(hdr, meta);
        if (hdr.kvcast.digest != meta.resident_digest || hdr.kvcast.size != meta.resident_size) {
            meta.fill = FILL_WRONG_DIGEST;
        } else if (meta.chunk_bit & meta.chunk_mask == 0) {
            meta.fill = FILL_NO_CHUNK;
        } else {
            meta.fill = FILL_FILLED;
        }
    }
}

// A READ is served when every chunk that it wants, and that the segment has, is valid, and it wants
// this copy or any.
control ServeDecision(inout headers_t hdr, inout meta_t meta) {
    bit<64> present = 0;

    apply {
        present = hdr.kvcast.wanted & meta.chunk_mask;
        if (present != 0 && present & ~meta.valid == 0 &&
            (hdr.kvcast.digest == 0 || hdr.kvcast.digest == meta.resident_digest)) {
            hdr.kvcast.wanted = present;
            hdr.kvcast.digest = meta.resident_digest;
            meta.copy = COPY_SERVE;
            meta.copy_bits = meta.reader_bits;
        }
    }
}
