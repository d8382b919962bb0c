// Says whether a segment has a slot of switch memory, and which. Runs on READ and DATA, on every
// pass: a serving READ that comes round must see an eviction at once.

control Resident(inout headers_t hdr, inout local_metadata_t local_metadata) {
    DIRECT_COUNTER(resident_lookups);   // READs, passes of them, and DATA: use of the entry

    // slot: 64 cells. generation: tells this stay in the slot from the one before. chunk_mask:
    // chunks that the segment has. digest, size: of the block's admitted copy.
    @name(".resident_at")
    action resident_at(bit<32> slot, bit<32> generation, bit<64> chunk_mask, bit<64> digest,
                       bit<32> size) {
        resident_lookups.count();
        local_metadata.resident = 1;
        local_metadata.slot = (slot_index_t)slot;
        local_metadata.generation = generation;
        local_metadata.chunk_mask = chunk_mask;
        local_metadata.resident_digest = digest;
        local_metadata.resident_size = size;
    }

    @name(".resident")
    table resident {
        key = {
            hdr.kvcast.namespace : exact @name("namespace");
            hdr.kvcast.key       : exact @name("key");
            hdr.kvcast.segment   : exact @name("segment");
        }
        actions = { resident_at; @defaultonly NoAction; }
        const default_action = NoAction();
        counters = resident_lookups;
        size = RESIDENT_SEGMENTS;
    }

    action compare_digest() {
        local_metadata.digest_difference = hdr.kvcast.digest ^ local_metadata.resident_digest;
    }

    apply {
        resident.apply();
        compare_digest();
    }
}
