// Decides whether a passing chunk of a resident segment is stored: only under the admitted copy's
// digest, and only a chunk that the segment has. That it comes from an owner of the bucket, the
// guard has seen to. Runs after Resident and ChunkBit, on DATA.

control FillDecision(inout headers_t hdr, inout state_t state) {
    action store() {
        state.fill = FILL_FILLED;
        state.fill_bit = state.chunk_bit;
    }

    action wrong_digest() {
        state.fill = FILL_WRONG_DIGEST;
    }

    action no_chunk() {
        state.fill = FILL_NO_CHUNK;
    }

    @name(".fill_verdict")
    table fill_verdict {
        key = {
            state.digest_difference : ternary @name("digest_difference");
            state.chunk_bit         : ternary @name("chunk_within");
        }
        actions = { store; wrong_digest; no_chunk; }
        const default_action = wrong_digest();
        const entries = {
            (0, 0) : no_chunk();
            (0, _) : store();
        }
    }

    DIRECT_COUNTER(fill_counts);

    @name(".count_fill")
    action count_fill() {
        fill_counts.count();
    }

    @name(".fills")
    table fills {
        key = { state.fill : exact @name("fill"); }
        actions = { count_fill; @defaultonly NoAction; }
        const default_action = NoAction();
        counters = fill_counts;
        const entries = {
            FILL_FILLED       : count_fill();
            FILL_WRONG_DIGEST : count_fill();
            FILL_NO_CHUNK     : count_fill();
        }
    }

    apply {
        if (state.has_memory == 1 && state.resident == 1 && state.is_answer == 1) {
            fill_verdict.apply();
        }
        fills.apply();
    }
}
