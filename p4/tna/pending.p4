// The pending interest table on TNA. Fingerprint and stamp are one dual stateful ALU, the ports
// another in a later stage; each is read and changed in one operation, so no packet sees an entry half
// changed. The rules are those of v1model/pending.p4 and coalescing.p4, in steps, the first two for each
// of the two entries of a set:
//
//   interest_step   compares and changes {fingerprint, stamp}; says MINE_FRESH, ... OTHER_STALE
//   ports_step      changes the ports by that, and returns who waited
//   coalescing      decides what becomes of the frame
//
// A READ looks at the second entry only where the first is another's; an answer looks at both.
//
// A free entry has no fingerprint and a stamp of 0, which is past any lease, so opening one and taking
// one over are the same instruction. A stateful ALU has four, takes two words from the packet, and
// compares with a constant; so time comes in sixteenths of a lease (control Clock).

const bit<32> LEASE = 16;       // in units of local_metadata.clock

struct interest_t {
    bit<32> fingerprint;        // as pending_entry_t's
    bit<32> stamp;              // local_metadata.clock of the last READ sent on, or answer seen
}

// Time in sixteenths of a lease, the lease rounded up to a power of two of ticks: a shift, since no
// stateful ALU divides, and none takes the lease beside time and fingerprint.
control Clock(inout local_metadata_t local_metadata) {
#define SHIFT(bits) action shift_##bits() { local_metadata.clock = local_metadata.now >> bits; }
    SHIFT(0) SHIFT(1) SHIFT(2) SHIFT(3) SHIFT(4) SHIFT(5)
    SHIFT(6) SHIFT(7) SHIFT(8) SHIFT(9) SHIFT(10) SHIFT(11) SHIFT(12)
#undef SHIFT

    @name(".lease_scale")
    table lease_scale {
        key = { local_metadata.lease_ticks : ternary @name("lease_ticks"); }
        actions = {
            shift_0; shift_1; shift_2; shift_3; shift_4; shift_5;
            shift_6; shift_7; shift_8; shift_9; shift_10; shift_11; shift_12;
        }
        const default_action = shift_12();      // 4.3 s is the longest lease
        const entries = {
            16                                : shift_0();      // 1 ms
            32w0x00000000 &&& 32w0xFFFFFFF0   : shift_0();
            32                                : shift_1();
            32w0x00000000 &&& 32w0xFFFFFFE0   : shift_1();
            64                                : shift_2();
            32w0x00000000 &&& 32w0xFFFFFFC0   : shift_2();
            128                               : shift_3();
            32w0x00000000 &&& 32w0xFFFFFF80   : shift_3();
            256                               : shift_4();
            32w0x00000000 &&& 32w0xFFFFFF00   : shift_4();
            512                               : shift_5();
            32w0x00000000 &&& 32w0xFFFFFE00   : shift_5();
            1024                              : shift_6();
            32w0x00000000 &&& 32w0xFFFFFC00   : shift_6();
            2048                              : shift_7();
            32w0x00000000 &&& 32w0xFFFFF800   : shift_7();
            4096                              : shift_8();
            32w0x00000000 &&& 32w0xFFFFF000   : shift_8();
            8192                              : shift_9();
            32w0x00000000 &&& 32w0xFFFFE000   : shift_9();
            16384                             : shift_10();
            32w0x00000000 &&& 32w0xFFFFC000   : shift_10();
            32768                             : shift_11();
            32w0x00000000 &&& 32w0xFFFF8000   : shift_11();
        }
        size = 32;
    }

    apply {
        lease_scale.apply();
    }
}

control Pending(inout headers_t hdr, inout local_metadata_t local_metadata) {
#define SET_INDEX (bit<16>)local_metadata.index[14:0]

#define SAY_MATCH this.predicate(entry.fingerprint == local_metadata.fingerprint, \
                                 local_metadata.clock - entry.stamp > LEASE)

    // A READ takes an entry that is past its lease, whosever it was (ask); a repeat also refreshes
    // an entry of its own (ask_again). Once the answer has begun, joiners still catch its end
    // (answer), which frees the entry (end).
#define WAY(part, READ_MATCH, number) \
    Register<interest_t, bit<16>>(PENDING_SETS) pending_interest##part; \
    RegisterAction<interest_t, bit<16>, bit<8>>(pending_interest##part) ask##part = { \
        void apply(inout interest_t entry, out bit<8> match) { \
            match = SAY_MATCH; \
            if (local_metadata.clock - entry.stamp > LEASE) { \
                entry.fingerprint = local_metadata.fingerprint; \
                entry.stamp = local_metadata.clock; \
            } \
        } \
    }; \
    RegisterAction<interest_t, bit<16>, bit<8>>(pending_interest##part) ask_again##part = { \
        void apply(inout interest_t entry, out bit<8> match) { \
            match = SAY_MATCH; \
            if (entry.fingerprint == local_metadata.fingerprint \
                || local_metadata.clock - entry.stamp > LEASE) { \
                entry.fingerprint = local_metadata.fingerprint; \
                entry.stamp = local_metadata.clock; \
            } \
        } \
    }; \
    RegisterAction<interest_t, bit<16>, bit<8>>(pending_interest##part) answer##part = { \
        void apply(inout interest_t entry, out bit<8> match) { \
            match = SAY_MATCH; \
            if (entry.fingerprint == local_metadata.fingerprint) { \
                entry.stamp = local_metadata.clock; \
            } \
        } \
    }; \
    RegisterAction<interest_t, bit<16>, bit<8>>(pending_interest##part) end##part = { \
        void apply(inout interest_t entry, out bit<8> match) { \
            match = SAY_MATCH; \
            if (entry.fingerprint == local_metadata.fingerprint) { \
                entry.fingerprint = 0; \
                entry.stamp = 0; \
            } \
        } \
    }; \
    action do_ask##part() { \
        local_metadata.match = ask##part.execute(SET_INDEX); \
        local_metadata.way = number; \
    } \
    action do_ask_again##part() { \
        local_metadata.match = ask_again##part.execute(SET_INDEX); \
        local_metadata.way = number; \
    } \
    action do_answer##part() { \
        local_metadata.match = answer##part.execute(SET_INDEX); \
        local_metadata.way = number; \
    } \
    action do_end##part() { \
        local_metadata.match = end##part.execute(SET_INDEX); \
        local_metadata.way = number; \
    } \
    @hidden \
    table interest_step##part { \
        key = { \
            local_metadata.kind      : exact   @name("kind"); \
            hdr.kvcast.flags         : ternary @name("flags"); \
            local_metadata.match     : ternary @name("match"); \
            local_metadata.coalesces : exact   @name("coalesces"); \
            local_metadata.serving   : exact   @name("serving"); \
        } \
        actions = { \
            do_ask##part; do_ask_again##part; do_answer##part; do_end##part; \
            @defaultonly NoAction; \
        } \
        const default_action = NoAction(); \
        const entries = { \
            (KIND_READ,      FLAG_RETRY &&& FLAG_RETRY, READ_MATCH, 1, 0) : do_ask_again##part(); \
            (KIND_READ,      _,                         READ_MATCH, 1, 0) : do_ask##part(); \
            (KIND_DATA,      _,                         _,          1, 0) : do_answer##part(); \
            (KIND_WRITE,     _,                         _,          1, 0) : do_answer##part(); \
            (KIND_LAST_DATA, _,                         _,          1, 0) : do_end##part(); \
            (KIND_MISS,      _,                         _,          1, 0) : do_end##part(); \
        } \
        size = 8; \
    } \
    Register<bit<32>, bit<16>>(PENDING_SETS) pending_ports##part; \
    RegisterAction<bit<32>, bit<16>, bit<32>>(pending_ports##part) join_ports##part = { \
        void apply(inout bit<32> ports, out bit<32> waiting) { \
            ports = ports | local_metadata.port_bits; \
            waiting = ports; \
        } \
    }; \
    RegisterAction<bit<32>, bit<16>, bit<32>>(pending_ports##part) open_ports##part = { \
        void apply(inout bit<32> ports, out bit<32> waiting) { \
            waiting = ports; \
            ports = local_metadata.port_bits; \
        } \
    }; \
    RegisterAction<bit<32>, bit<16>, bit<32>>(pending_ports##part) read_ports##part = { \
        void apply(inout bit<32> ports, out bit<32> waiting) { \
            waiting = ports | local_metadata.waiting; \
        } \
    }; \
    /* Read and cleared at once, or who joins in between would wait for nothing. */ \
    RegisterAction<bit<32>, bit<16>, bit<32>>(pending_ports##part) take_ports##part = { \
        void apply(inout bit<32> ports, out bit<32> waiting) { \
            waiting = ports | local_metadata.waiting; \
            ports = 0; \
        } \
    }; \
    action do_join_ports##part() { local_metadata.waiting = join_ports##part.execute(SET_INDEX); } \
    action do_open_ports##part() { local_metadata.waiting = open_ports##part.execute(SET_INDEX); } \
    action do_read_ports##part() { local_metadata.waiting = read_ports##part.execute(SET_INDEX); } \
    action do_take_ports##part() { local_metadata.waiting = take_ports##part.execute(SET_INDEX); } \
    @hidden \
    table ports_step##part { \
        key = { \
            local_metadata.kind  : exact @name("kind"); \
            local_metadata.match : exact @name("match"); \
            local_metadata.way   : exact @name("way"); \
        } \
        actions = { \
            do_join_ports##part; do_open_ports##part; do_read_ports##part; do_take_ports##part; \
            @defaultonly NoAction; \
        } \
        const default_action = NoAction(); \
        const entries = { \
            (KIND_READ,      MINE_FRESH, number)  : do_join_ports##part(); \
            (KIND_READ,      MINE_STALE, number)  : do_join_ports##part(); \
            (KIND_READ,      OTHER_STALE, number) : do_open_ports##part(); \
            (KIND_DATA,      MINE_FRESH, number)  : do_read_ports##part(); \
            (KIND_DATA,      MINE_STALE, number)  : do_read_ports##part(); \
            (KIND_WRITE,     MINE_FRESH, number)  : do_read_ports##part(); \
            (KIND_WRITE,     MINE_STALE, number)  : do_read_ports##part(); \
            (KIND_LAST_DATA, MINE_FRESH, number)  : do_take_ports##part(); \
            (KIND_LAST_DATA, MINE_STALE, number)  : do_take_ports##part(); \
            (KIND_MISS,      MINE_FRESH, number)  : do_take_ports##part(); \
            (KIND_MISS,      MINE_STALE, number)  : do_take_ports##part(); \
        } \
        size = 16; \
    }
    WAY(_first, _, 1)
    WAY(_second, OTHER_FRESH, 2)
#undef WAY
#undef SAY_MATCH
#undef SET_INDEX

    apply {
        interest_step_first.apply();
        ports_step_first.apply();
        interest_step_second.apply();
        ports_step_second.apply();
    }
}

control Coalescing(inout headers_t hdr, inout local_metadata_t local_metadata) {
    // An answer: who waits but the addressee, and all to whom it goes.
    action compare_ports() {
        local_metadata.others = local_metadata.waiting & ~local_metadata.out_bit;
        local_metadata.shared_bits = local_metadata.waiting | local_metadata.out_bit;
    }

    action sent_on(bit<8> decision) {
        local_metadata.decision = decision;
        hdr.kvcast.flags = hdr.kvcast.flags | FLAG_SHARED;
        hdr.udp.checksum = 0;   // RFC 768: none
    }

    action join() {
        local_metadata.decision = DECISION_JOIN;
        local_metadata.delivery = DELIVER_NOWHERE;
    }

    action collide() {
        local_metadata.decision = DECISION_COLLIDE;
        hdr.kvcast.flags = hdr.kvcast.flags & ~FLAG_SHARED;
        hdr.udp.checksum = 0;
    }

    action share() {
        local_metadata.port_bits = local_metadata.shared_bits;
        local_metadata.decision = DECISION_SHARED;
        local_metadata.delivery = DELIVER_SHARED;
        hdr.kvcast.flags = hdr.kvcast.flags | FLAG_SHARED;
    }

    action share_write() {
        local_metadata.port_bits = local_metadata.waiting;
        local_metadata.decision = DECISION_SHARED;
        local_metadata.delivery = DELIVER_WRITE_SHARED;
    }

    action pass_by() { }

    @name(".coalescing")
    table coalescing {
        key = {
            local_metadata.kind    : exact   @name("kind");
            local_metadata.match   : ternary @name("match");
            hdr.kvcast.flags       : ternary @name("flags");
            local_metadata.waiting : ternary @name("waiting");
            local_metadata.others  : ternary @name("others");
        }
        actions = { sent_on; join; collide; share; share_write; pass_by; }
        const default_action = pass_by();
        const entries = {
            // kind          match        flags                      waiting others
            (KIND_DATA,      _,           _,                         _, 0) : pass_by();
            (KIND_DATA,      _,           _,                         _, _) : share();
            (KIND_WRITE,     _,           _,                         0, _) : pass_by();
            (KIND_WRITE,     _,           _,                         _, _) : share_write();
            (KIND_LAST_DATA, _,           _,                         _, 0) : pass_by();
            (KIND_LAST_DATA, _,           _,                         _, _) : share();
            (KIND_READ,      OTHER_STALE, _,                         0, _) : sent_on(DECISION_NEW);
            (KIND_READ,      OTHER_STALE, _,                         _, _) : sent_on(DECISION_EXPIRED);
            (KIND_READ,      MINE_FRESH,  FLAG_RETRY &&& FLAG_RETRY, _, _) : sent_on(DECISION_RETRY);
            (KIND_READ,      MINE_STALE,  FLAG_RETRY &&& FLAG_RETRY, _, _) : sent_on(DECISION_RETRY);
            (KIND_READ,      MINE_STALE,  _,                         _, _) : sent_on(DECISION_EXPIRED);
            (KIND_READ,      MINE_FRESH,  _,                         _, _) : join();
            (KIND_READ,      OTHER_FRESH, _,                         _, _) : collide();
            (KIND_MISS,      _,           _,                         _, 0) : pass_by();
            (KIND_MISS,      _,           _,                         _, _) : share();
        }
        size = 32;
    }

    apply {
        compare_ports();
        coalescing.apply();
    }
}
