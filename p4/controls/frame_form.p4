// Decides whether a kvcast frame has the form that its op promises: version, length, bitmap.

control FrameForm(in headers_t hdr, inout meta_t meta) {
    action well_formed() { meta.well_formed = 1; }
    action malformed() { meta.well_formed = 0; }
    table frame_form {
        key = {
            hdr.kvcast.version : exact;
            hdr.kvcast.op : exact;
            hdr.kvcast.flags : ternary;
            hdr.udp.length : exact;
        }
        actions = { well_formed; malformed; }
        const default_action = malformed();
        const entries = {
            (KVCAST_VERSION, OP_READ, 0 &&& FLAG_PADDED, UDP_BYTES + KVCAST_BYTES) : well_formed();
            (KVCAST_VERSION, OP_READ, FLAG_PADDED &&& FLAG_PADDED,
                UDP_BYTES + KVCAST_BYTES + READ_PADDING_BYTES) : well_formed();
            (KVCAST_VERSION, OP_DATA, 0 &&& FLAG_PADDED,
                UDP_BYTES + KVCAST_BYTES + CHUNK_BYTES) : well_formed();
            (KVCAST_VERSION, OP_MISS, 0 &&& FLAG_PADDED, UDP_BYTES + KVCAST_BYTES) : well_formed();
            (KVCAST_VERSION, OP_OFFER, 0 &&& FLAG_PADDED,
                UDP_BYTES + KVCAST_BYTES + OFFER_BYTES) : well_formed();
        }
        size = 8;
    }
    apply {
        frame_form.apply();
        if (hdr.ipv4.total_length != hdr.udp.length + IPV4_BYTES) { meta.well_formed = 0; }
        if (hdr.kvcast.op == OP_READ && hdr.kvcast.wanted == 0) { meta.well_formed = 0; }
    }
}
