// The hashes of a segment's name, 16 bits each: the index of its pending entry, what tells it from
// others there, and the third row of the heat sketch (the first two serve the other rows). No more
// than 32 bits of hash reach one table, so each has its own.

control BlockHash(inout headers_t hdr, inout local_metadata_t local_metadata) {
    CRCPolynomial<bit<16>>(16w0x1021, false, false, false, 16w0xFFFF, 16w0) ccitt;
    CRCPolynomial<bit<16>>(16w0x0589, false, false, false, 16w1, 16w1) dect;
    Hash<bit<16>>(HashAlgorithm_t.CRC16) index_hash;
    Hash<bit<16>>(HashAlgorithm_t.CUSTOM, ccitt) print_hash;
    Hash<bit<16>>(HashAlgorithm_t.CUSTOM, dect) other_hash;
    Hash<bit<32>>(HashAlgorithm_t.IDENTITY) assemble;
    Hash<bit<16>>(HashAlgorithm_t.IDENTITY) slot_print;

    action make_index() {
        local_metadata.index =
            index_hash.get({ hdr.kvcast.namespace, hdr.kvcast.key, hdr.kvcast.segment });
    }

    action make_print() {
        local_metadata.print =
            print_hash.get({ hdr.kvcast.namespace, hdr.kvcast.key, hdr.kvcast.segment });
    }

    action make_other_hash() {
        local_metadata.other_hash =
            other_hash.get({ hdr.kvcast.namespace, hdr.kvcast.key, hdr.kvcast.segment });
    }

    // A shared answer by RDMA: its packets say what the READ's tag has said.
    action take_index() {
        local_metadata.index = hdr.write.immediate_low ^ hdr.write.address_low;
        local_metadata.entry_namespace = hdr.write.immediate_high ^ hdr.write.address_mid;
    }

    action take_tagged_index() {
        local_metadata.index = hdr.kvcast.tag[15:0];
    }

    action take_slot() {
        local_metadata.print = slot_print.get({ 7w0x40, local_metadata.place[8:2], 2w0 });
    }

    // As pending_entry_t says: the namespace whole, 14 bits of hash or the slot, the hash's bit that
    // does not choose the set, and 1.
    action make_fingerprint() {
        local_metadata.fingerprint = assemble.get({ local_metadata.entry_namespace,
            local_metadata.print[15:2], local_metadata.index[15:15], 1w1 });
    }

    @hidden
    table entry_index {
        key = {
            hdr.write.isValid() : exact;
            hdr.kvcast.flags    : ternary;
        }
        actions = { make_index; take_index; take_tagged_index; @defaultonly NoAction; }
        const default_action = NoAction();
        const entries = {
            (true,  _)                         : take_index();
            (false, FLAG_WRITE &&& FLAG_WRITE) : take_tagged_index();
            (false, _)                         : make_index();
        }
        size = 4;
    }

    @hidden
    table entry_print {
        key = {
            hdr.write.isValid() : exact;
            hdr.kvcast.flags    : ternary;
        }
        actions = { make_print; take_slot; @defaultonly NoAction; }
        const default_action = NoAction();
        const entries = {
            (true,  _)                         : take_slot();
            (false, FLAG_WRITE &&& FLAG_WRITE) : take_slot();
            (false, _)                         : make_print();
        }
        size = 4;
    }

    apply {
        entry_index.apply();
        entry_print.apply();
        make_other_hash();
        make_fingerprint();
    }
}
