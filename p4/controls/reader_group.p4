// Widens a full-segment READ that names a reader group to all of the group's ports, so that its
// answer goes to every member. A group counts only for its own members. Runs after the guards, and
// before switch memory and the pending table.

control ReaderGroup(inout headers_t hdr, inout local_metadata_t local_metadata) {
    bit<32> group_bits = 0;
    bit<16> group_serve_group = 0;
    bit<32> members = 0;

    @name(".set_reader_group")
    action set_reader_group(bit<32> port_bits, bit<16> serve_group) {
        group_bits = port_bits;
        group_serve_group = serve_group;
    }

    action intersect() {
        members = group_bits & local_metadata.reader_bit;
    }

    @name(".reader_group")
    table reader_group {
        key = {
            hdr.kvcast.namespace : exact @name("namespace");
            hdr.kvcast.group     : exact @name("group");
        }
        actions = { set_reader_group; NoAction; }
        const default_action = NoAction();
        size = READER_GROUPS;
    }

    apply {
        if (hdr.kvcast.group != 0) {
            reader_group.apply();
        }
        intersect();
        if (members != 0 && local_metadata.kind == KIND_READ) {
            local_metadata.grouped = 1;
            local_metadata.port_bits = group_bits;
            local_metadata.serve_group = group_serve_group;
        }
    }
}
