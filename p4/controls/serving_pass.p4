// A READ that comes round for its next chunk: it goes on being served while its segment keeps slot
// and generation, so that an eviction takes effect at once. Else what is left of it goes on to the
// home as a PARTIAL READ, of the copy that it has begun with, under generation `begun`. Runs after Resident, in place of
// ServingDecision; what was stored stays stored under one generation, so validity is not read again.

control ServingPass(inout headers_t hdr, inout state_t state, in bit<32> begun) {
    action go_on() {
        state.serving = 1;
        state.decision = DECISION_SERVING;
        state.remaining = hdr.kvcast.wanted;
    }

    // Of the flags only PADDED stays, and PARTIAL comes: by slices, since a stage does one operation.
    action go_home() {
        state.kind = KIND_PARTIAL_READ;
        hdr.kvcast.flags[15:5] = 0;
        hdr.kvcast.flags[3:0] = FLAG_PARTIAL[3:0];
        hdr.kvcast.size = 0;
        hdr.kvcast.chunk = 0;
    }

    apply {
        if (state.resident == 1 && state.generation == begun) {
            go_on();
        } else {
            go_home();
        }
    }
}
