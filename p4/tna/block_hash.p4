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

    // As pending_entry_t says: the namespace whole, 15 bits of hash, and 1.
    action make_fingerprint() {
        local_metadata.fingerprint =
            assemble.get({ hdr.kvcast.namespace, local_metadata.print[15:1], 1w1 });
    }

    apply {
        make_index();
        make_print();
        make_other_hash();
        make_fingerprint();
    }
}
