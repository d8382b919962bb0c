// Decides whether a passing chunk of a resident segment is stored: only under the admitted copy's
// digest, and only a chunk that the segment has. PortGuard has already made sure that it comes from
// a home of the bucket. Runs after Resident and ChunkBit, on DATA.

control FillDecision(inout headers_t hdr, inout local_metadata_t local_metadata) {
    action store() {
        local_metadata.fill = FILL_FILLED;
        local_metadata.fill_bit = local_metadata.chunk_bit;
    }

    action wrong_digest() {
        local_metadata.fill = FILL_WRONG_DIGEST;
    }

    action no_chunk() {
        local_metadata.fill = FILL_NO_CHUNK;
    }

    @name(".fill_verdict")
    table fill_verdict {
        key = {
            local_metadata.digest_difference : ternary @name("digest_difference");
            local_metadata.chunk_bit         : ternary @name("chunk_within");
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
        key = { local_metadata.fill : exact @name("fill"); }
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
        if (local_metadata.has_memory == 1 && local_metadata.resident == 1
            && local_metadata.is_answer == 1) {
            fill_verdict.apply();
        }
        fills.apply();
    }
}
