// A READ that comes round for its next chunk. While its segment still has the slot and generation
// (`begun`) under which serving began, it is served further; so an eviction takes effect at once.
// Otherwise what is left of it goes to the home as a PARTIAL READ of the same copy. Runs after
// Resident, in place of ServingDecision. What is stored under one generation stays stored, so the
// slot's validity is not read again.

control ServingPass(inout headers_t hdr, inout local_metadata_t local_metadata, in bit<32> begun) {
    action go_on() {
        local_metadata.serving = 1;
        local_metadata.decision = DECISION_SERVING;
        local_metadata.remaining = hdr.kvcast.wanted;
    }

    // Of the flags only PADDED stays, and PARTIAL comes: by slices, since a stage does one operation.
    action go_home() {
        local_metadata.kind = KIND_PARTIAL_READ;
        hdr.kvcast.flags[15:5] = 0;
        hdr.kvcast.flags[3:0] = FLAG_PARTIAL[3:0];
        hdr.kvcast.size = 0;
        hdr.kvcast.chunk = 0;
    }

    apply {
        if (local_metadata.resident == 1 && local_metadata.generation == begun) {
            go_on();
        } else {
            go_home();
        }
    }
}
