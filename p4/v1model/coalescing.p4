// The rules of the pending interest table on v1model: given one entry and one frame, what becomes of
// both. Pending, which owns the registers, reads the entry before this control and writes it back
// after it. (tna/pending.p4 has the same rules, cut into what stateful ALUs can do.)
//
// A READ is sent on unless somebody's READ of the same segment is in flight. DATA and MISS go to
// everybody who waits. The end of an answer frees the entry, its fingerprint and its ports at once:
// an entry with a fingerprint and no ports would swallow the next READ. When in doubt a READ is sent
// on: one too many costs a copy, one too few costs a time-out.
//
// A repeat (RETRY) is always sent on, or one lost frame would stall everybody who joined. That the
// reader's own bit is set does not mean a repeat: another member of its reader group may have set it,
// or the reader has sent the same READ twice, in case one is lost while the home gathers READs. A
// READ that is sent on while the entry holds its reader is marked SHARED: the home may answer it
// together with other READs so marked.

control Coalescing(inout headers_t hdr, inout local_metadata_t local_metadata) {
    action open() {
        local_metadata.entry.fingerprint = local_metadata.fingerprint;
        local_metadata.entry.stamp = local_metadata.now;
        local_metadata.entry.ports = local_metadata.port_bits;
        local_metadata.decision = DECISION_NEW;
        local_metadata.demand = 1;
        hdr.kvcast.flags = hdr.kvcast.flags | FLAG_SHARED;
        hdr.udp.checksum = 0;   // RFC 768: none
    }

    action join() {
        local_metadata.entry.ports = local_metadata.entry.ports | local_metadata.port_bits;
        local_metadata.decision = DECISION_JOIN;
        local_metadata.delivery = DELIVER_NOWHERE;
        local_metadata.demand = 1;
    }

    action refresh() {
        local_metadata.entry.stamp = local_metadata.now;
        local_metadata.entry.ports = local_metadata.entry.ports | local_metadata.port_bits;
        local_metadata.decision = DECISION_RETRY;
        hdr.kvcast.flags = hdr.kvcast.flags | FLAG_SHARED;
        hdr.udp.checksum = 0;
    }

    // Past its lease, but this segment's: ask again, for everybody who may still wait.
    action ask_again() {
        local_metadata.entry.stamp = local_metadata.now;
        local_metadata.entry.ports = local_metadata.entry.ports | local_metadata.port_bits;
        local_metadata.decision = DECISION_EXPIRED;
        local_metadata.demand = 1;
        hdr.kvcast.flags = hdr.kvcast.flags | FLAG_SHARED;
        hdr.udp.checksum = 0;
    }

    // Past its lease, and another's: who waited there has asked again by now, or given up.
    action take_over() {
        local_metadata.entry.fingerprint = local_metadata.fingerprint;
        local_metadata.entry.stamp = local_metadata.now;
        local_metadata.entry.ports = local_metadata.port_bits;
        local_metadata.decision = DECISION_EXPIRED;
        local_metadata.demand = 1;
        hdr.kvcast.flags = hdr.kvcast.flags | FLAG_SHARED;
        hdr.udp.checksum = 0;
    }

    action collide() {
        local_metadata.decision = DECISION_COLLIDE;
        local_metadata.demand = 1;
        hdr.kvcast.flags = hdr.kvcast.flags & ~FLAG_SHARED;
        hdr.udp.checksum = 0;
    }

    // The frame goes to everybody in the entry and to its addressee.
    action share() {
        local_metadata.port_bits = local_metadata.entry.ports | local_metadata.out_bit;
        // The answer has begun: who joins now still gets its end.
        local_metadata.entry.stamp = local_metadata.now;
        local_metadata.decision = DECISION_SHARED;
        local_metadata.delivery = DELIVER_SHARED;
        hdr.kvcast.flags = hdr.kvcast.flags | FLAG_SHARED;
    }

    action share_write() {
        local_metadata.port_bits = local_metadata.entry.ports;
        local_metadata.entry.stamp = local_metadata.now;
        local_metadata.decision = DECISION_SHARED;
        local_metadata.delivery = DELIVER_WRITE_SHARED;
    }

    action share_and_end() {
        local_metadata.port_bits = local_metadata.entry.ports | local_metadata.out_bit;
        local_metadata.entry.fingerprint = 0;
        local_metadata.entry.ports = 0;
        local_metadata.decision = DECISION_SHARED;
        local_metadata.delivery = DELIVER_SHARED;
        hdr.kvcast.flags = hdr.kvcast.flags | FLAG_SHARED;
    }

    // Nobody but the addressee waits: the frame stays as Forwarding left it.
    action continue_alone() {
        local_metadata.entry.stamp = local_metadata.now;
    }

    action end_alone() {
        local_metadata.entry.fingerprint = 0;
        local_metadata.entry.ports = 0;
    }

    action pass_by() { }

    @name(".coalescing")
    table coalescing {
        key = {
            local_metadata.kind   : exact   @name("kind");
            local_metadata.free   : ternary @name("free");
            local_metadata.mine   : ternary @name("mine");
            local_metadata.stale  : ternary @name("stale");
            hdr.kvcast.flags      : ternary @name("flags");
            local_metadata.others : ternary @name("others");
        }
        actions = {
            open; join; refresh; ask_again; take_over; collide;
            share; share_write; share_and_end; continue_alone; end_alone; pass_by;
        }
        const default_action = pass_by();
        const entries = {
            // kind           free mine stale flags                      others
            (KIND_DATA,       _,   1,   _,    _,                         0) : continue_alone();
            (KIND_DATA,       _,   1,   _,    _,                         _) : share();
            (KIND_WRITE,      _,   1,   _,    _,                         _) : share_write();
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
