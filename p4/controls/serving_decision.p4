// Decides whether a READ of a resident segment is answered from switch memory: all that it wants
// must be there, in the copy that it pins (or any), and the reader's port must have a serve group.
// A target that cannot make a packet longer also wants the READ padded (SERVABLE_FLAGS).
// Runs after Resident and the slot's validity.

control ServingDecision(inout headers_t hdr, inout state_t state) {
    @name(".resident_hits")
    PACKET_COUNTER(SLOTS, resident_hits);   // READs served, by slot; counted on the first pass only
    bit<64> wanted = 0;
    bit<64> missing = 0;

    // One operation a stage, so two actions.
    action cut() {
        wanted = hdr.kvcast.wanted & state.chunk_mask;
    }

    action look() {
        missing = wanted & ~state.valid;
    }

    action serve() {
        state.serving = 1;
        state.decision = DECISION_HIT;
        state.delivery = DELIVER_SERVE;
        state.serving_generation = state.generation;
        hdr.kvcast.digest = state.resident_digest;
        hdr.kvcast.size = state.resident_size;
        state.remaining = wanted;
        resident_hits.count(state.slot);
    }

    action decline() { }

    @name(".serving_decision")
    table serving_decision {
        key = {
            hdr.kvcast.flags   : ternary @name("flags");
            state.serve_group  : ternary @name("serve_group");
            wanted             : ternary @name("wanted");
            missing            : ternary @name("missing");
            hdr.kvcast.digest  : ternary @name("pinned");
            state.digest_difference : ternary @name("digest_difference");
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
        if (state.has_memory == 1 && state.resident == 1 && state.is_answer == 0) {
            serving_decision.apply();
        }
        if (state.serving == 1 && state.grouped == 1) {
            state.delivery = DELIVER_SERVE_GROUP;
        }
    }
}
