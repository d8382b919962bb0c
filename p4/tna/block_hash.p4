// The hashes of a segment's name: one of 32 bits for the pending table and two rows of the heat
// sketch, the same as v1model's, and one of 16 for the third row.

control BlockHash(inout headers_t hdr, inout state_t state) {
    Hash<bit<32>>(HashAlgorithm_t.CRC32) name_hash;
    Hash<bit<16>>(HashAlgorithm_t.CRC16) other_hash;

    Hash<bit<32>>(HashAlgorithm_t.IDENTITY) assemble;   // bits from three containers into one

    // Two actions, since no more than 32 bits of hash reach one.
    action make_hash() {
        state.hash = name_hash.get({ hdr.kvcast.namespace, hdr.kvcast.key, hdr.kvcast.segment });
    }

    action make_other_hash() {
        state.other_hash =
            other_hash.get({ hdr.kvcast.namespace, hdr.kvcast.key, hdr.kvcast.segment });
    }

    action make_fingerprint() {
        state.fingerprint = assemble.get({ hdr.kvcast.namespace, state.hash[31:17], 1w1 });
    }

    apply {
        make_hash();
        make_other_hash();
        make_fingerprint();
    }
}
