// Decides the fate of a full READ from what the pending table found: one row a case. The four
// outcomes of DESIGN's interest table are NEW, JOIN, COLLIDE, and the repeat (RETRY).
// Must run after the pending table.

control ReadDecision(in headers_t hdr, inout meta_t meta) {
    action first_read() { meta.decision = DECIDE_NEW; }
    action took_over() { meta.decision = DECIDE_EXPIRED; }
    action joined() { meta.decision = DECIDE_JOIN; }
    action repeated() { meta.decision = DECIDE_RETRY; }
    action collided() { meta.decision = DECIDE_COLLIDE; }
    table read_decision {
        key = {
            meta.pending : exact;
            hdr.kvcast.flags : ternary;     // RETRY
            meta.own : ternary;             // the reader waits already
            meta.group_bits : ternary;      // it asks for a group
        }
        actions = { first_read; took_over; joined; repeated; collided; }
        const default_action = collided();
        const entries = {
            (PENDING_FREE, _, _, _) : first_read();
            (PENDING_EXPIRED, _, _, _) : took_over();
            (PENDING_SAME, FLAG_RETRY &&& FLAG_RETRY, _, _) : repeated();
            // Not waiting yet: wait.
            (PENDING_SAME, _, 0, _) : joined();
            // Waiting, without RETRY and alone: a repeat all the same.
            (PENDING_SAME, _, _, 0) : repeated();
            // Waiting because another member of its group asked: the answer is on its way.
            (PENDING_SAME, _, _, _) : joined();
            (PENDING_OTHER, _, _, _) : collided();
        }
        size = 8;
    }
    apply { read_decision.apply(); }
}
