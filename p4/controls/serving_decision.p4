// Decides whether a READ of a resident segment is answered from switch memory. All chunks that it
// wants must be stored, in the copy whose digest it names (or in any, if it names none), and the
// reader's port must have a serve group. A target that cannot make a packet longer also needs the
// READ to be padded (SERVABLE_FLAGS). Runs after Resident and SlotValidity.

control ServingDecision(inout headers_t hdr, inout local_metadata_t local_metadata) {
    @name(".resident_hits")
    PACKET_COUNTER(SLOTS, resident_hits);   // READs served, by slot; counted on the first pass only
    bit<64> wanted = 0;
    bit<64> missing = 0;

    // One operation a stage, so two actions.
    action cut() {
        wanted = hdr.kvcast.wanted & local_metadata.chunk_mask;
    }

    action look() {
        missing = wanted & ~local_metadata.valid;
    }

    action serve() {
        local_metadata.serving = 1;
        local_metadata.decision = DECISION_HIT;
        local_metadata.delivery = DELIVER_SERVE;
        local_metadata.serving_generation = local_metadata.generation;
        hdr.kvcast.digest = local_metadata.resident_digest;
        hdr.kvcast.size = local_metadata.resident_size;
        local_metadata.remaining = wanted;
        resident_hits.count(local_metadata.slot);
    }

    action decline() { }

    @name(".serving_decision")
    table serving_decision {
        key = {
            hdr.kvcast.flags                 : ternary @name("flags");
            local_metadata.serve_group       : ternary @name("serve_group");
            wanted                           : ternary @name("wanted");
            missing                          : ternary @name("missing");
            hdr.kvcast.digest                : ternary @name("digest");
            local_metadata.digest_difference : ternary @name("digest_difference");
        }
        actions = { serve; decline; }
        const default_action = decline();
        const entries = {
            (_,              0, _, _, _, _) : decline();    // nowhere to serve to
            (_,              _, 0, _, _, _) : decline();    // wants nothing that the segment has
            (SERVABLE_FLAGS, _, _, 0, 0, _) : serve();      // any copy will do
            (SERVABLE_FLAGS, _, _, 0, _, 0) : serve();      // this copy
        }
    }

    apply {
        cut();
        look();
        if (local_metadata.has_memory == 1 && local_metadata.resident == 1
            && local_metadata.is_answer == 0) {
            serving_decision.apply();
        }
        if (local_metadata.serving == 1 && local_metadata.grouped == 1) {
            local_metadata.delivery = DELIVER_SERVE_GROUP;
        }
    }
}
