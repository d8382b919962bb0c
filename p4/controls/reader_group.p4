// Decides for whom a READ asks: for its sender, or for the reader group that it names, if its
// sender is a member. Must run after the port guard, which gives the sender's bit.

control ReaderGroup(in headers_t hdr, inout meta_t meta) {
    action set_reader_group(bit<32> port_bits, bit<16> serve_group) {
        meta.group_bits = port_bits;
        meta.group_serve_group = serve_group;
    }
    action no_reader_group() { meta.group_bits = 0; }
    table reader_group {
        key = { hdr.kvcast.namespace : exact; hdr.kvcast.group : exact; }
        actions = { set_reader_group; no_reader_group; }
        const default_action = no_reader_group();
        size = READER_GROUP_ENTRIES;
    }
    apply {
        meta.reader_bits = meta.port_bit;
        if (hdr.kvcast.group != 0) {
            reader_group.apply();
            if (meta.group_bits & meta.port_bit != 0) {
                meta.reader_bits = meta.group_bits;
                meta.serve_group = meta.group_serve_group;
            } else {
                meta.group_bits = 0;
            }
        }
    }
}
