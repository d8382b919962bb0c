// The rules of the pending table: given one entry and one frame, what becomes of both. The entry is
// read and written back around this control by the target's Pending, which owns the registers.
//
// A READ is sent on unless somebody's READ of the same segment is under way; DATA and MISS go to
// everybody who waits; the end of an answer frees the entry, fingerprint and ports at once, since
// an entry with a fingerprint and no ports would swallow the next READ. When in doubt a READ is
// sent on: a READ too many costs a copy, one too few costs a timeout.
//
// A repeat (RETRY) is always sent on, or one lost frame would stall everybody who joined. The
// reader's own bit is no sign of a repeat: it may stem from another member of its reader group, or
// from the same READ sent twice, lest it be lost while the home gathers. What is sent on while the
// entry holds its reader bears the SHARED mark: the home may answer it together with others so
// marked.

control Coalescing(inout headers_t hdr, inout state_t state) {
    action open() {
        state.entry.fingerprint = state.fingerprint;
        state.entry.stamp = state.now;
        state.entry.ports = state.port_bits;
        state.decision = DECISION_NEW;
        state.demand = 1;
        hdr.kvcast.flags = hdr.kvcast.flags | FLAG_SHARED;
        hdr.udp.checksum = 0;   // RFC 768: none
    }

    action join() {
        state.entry.ports = state.entry.ports | state.port_bits;
        state.decision = DECISION_JOIN;
        state.delivery = DELIVER_NOWHERE;
        state.demand = 1;
    }

    action refresh() {
        state.entry.stamp = state.now;
        state.entry.ports = state.entry.ports | state.port_bits;
        state.decision = DECISION_RETRY;
        hdr.kvcast.flags = hdr.kvcast.flags | FLAG_SHARED;
        hdr.udp.checksum = 0;
    }

    // Past its lease, but this segment's: ask again, for everybody who may still wait.
    action ask_again() {
        state.entry.stamp = state.now;
        state.entry.ports = state.entry.ports | state.port_bits;
        state.decision = DECISION_EXPIRED;
        state.demand = 1;
        hdr.kvcast.flags = hdr.kvcast.flags | FLAG_SHARED;
        hdr.udp.checksum = 0;
    }

    // Past its lease, and another's: who waited there has asked again by now, or given up.
    action take_over() {
        state.entry.fingerprint = state.fingerprint;
        state.entry.stamp = state.now;
        state.entry.ports = state.port_bits;
        state.decision = DECISION_EXPIRED;
        state.demand = 1;
        hdr.kvcast.flags = hdr.kvcast.flags | FLAG_SHARED;
        hdr.udp.checksum = 0;
    }

    action collide() {
        state.decision = DECISION_COLLIDE;
        state.demand = 1;
        hdr.kvcast.flags = hdr.kvcast.flags & ~FLAG_SHARED;
        hdr.udp.checksum = 0;
    }

    // The frame goes to everybody in the entry and to its addressee.
    action share() {
        state.port_bits = state.entry.ports | state.out_bit;
        state.entry.stamp = state.now;      // the answer is under way: joiners still catch its end
        state.decision = DECISION_SHARED;
        state.delivery = DELIVER_SHARED;
        hdr.kvcast.flags = hdr.kvcast.flags | FLAG_SHARED;
    }

    action share_and_end() {
        state.port_bits = state.entry.ports | state.out_bit;
        state.entry.fingerprint = 0;
        state.entry.ports = 0;
        state.decision = DECISION_SHARED;
        state.delivery = DELIVER_SHARED;
        hdr.kvcast.flags = hdr.kvcast.flags | FLAG_SHARED;
    }

    // Nobody but the addressee waits: the frame stays as Forwarding left it.
    action continue_alone() {
        state.entry.stamp = state.now;
    }

    action end_alone() {
        state.entry.fingerprint = 0;
        state.entry.ports = 0;
    }

    action pass_by() { }

    @name(".coalescing")
    table coalescing {
        key = {
            state.kind         : exact   @name("kind");
            state.free         : ternary @name("free");
            state.mine         : ternary @name("mine");
            state.stale        : ternary @name("stale");
            hdr.kvcast.flags   : ternary @name("flags");
            state.others       : ternary @name("others");
        }
        actions = {
            open; join; refresh; ask_again; take_over; collide;
            share; share_and_end; continue_alone; end_alone; pass_by;
        }
        const default_action = pass_by();
        const entries = {
            // kind           free mine stale flags                      others
            (KIND_DATA,       _,   1,   _,    _,                         0) : continue_alone();
            (KIND_DATA,       _,   1,   _,    _,                         _) : share();
            (KIND_LAST_DATA,  _,   1,   _,    _,                         0) : end_alone();
            (KIND_LAST_DATA,  _,   1,   _,    _,                         _) : share_and_end();
            (KIND_READ,       1,   _,   _,    _,                         _) : open();
            (KIND_READ,       _,   1,   _,    FLAG_RETRY &&& FLAG_RETRY, _) : refresh();
            (KIND_READ,       _,   1,   1,    _,                         _) : ask_again();
            (KIND_READ,       _,   _,   1,    _,                         _) : take_over();
            (KIND_READ,       _,   1,   _,    _,                         _) : join();
            (KIND_READ,       _,   _,   _,    _,                         _) : collide();
            (KIND_MISS,       _,   1,   _,    _,                         0) : end_alone();
            (KIND_MISS,       _,   1,   _,    _,                         _) : share_and_end();
        }
    }

    apply {
        coalescing.apply();
    }
}
