// What TNA calls the things that the shared controls need (v1model/arch.p4 says so for v1model), and
// the one switch between Tofino 1 and 2. Include before any control.

#ifndef KVCAST_ARCH_P4_
#define KVCAST_ARCH_P4_

#include <core.p4>
#ifdef KVCAST_TOFINO2
#include <t2na.p4>
#else
#include <tna.p4>
#endif

#define DIRECT_COUNTER(name) DirectCounter<bit<64>>(CounterType_t.PACKETS_AND_BYTES) name
#define PACKET_COUNTER(size, name) Counter<bit<64>, slot_index_t>(size, CounterType_t.PACKETS) name

typedef bit<16> slot_index_t;     // what indexes an array of slots
#define TARGET_METADATA \
    bit<16> index;          /* hash of namespace, key and segment: [14:0] the pending set */ \
    bit<16> print;          /* another: its fingerprint */ \
    bit<16> other_hash;     /* and another */ \
    bit<16> entry_namespace;    /* of the pending entry */ \
    bit<16> place;          /* of a shared answer by RDMA: [8:2] its slot */ \
    bit<32> clock;          /* now, in sixteenths of a lease */ \
    bit<8>  match;          /* MINE_*, OTHER_*: of the pending entry that was looked at last */ \
    bit<8>  way;            /* which of its set it is: 1, 2 */ \
    bit<32> waiting;        /* ports in its pending entries */ \
    bit<32> shared_bits;    /* and the addressee's */ \
    bit<32> heat_ports;     /* heat_t.port_bits */ \
    bit<16> heat_window; \
    bit<16> heat_report;    /* [15] 1, [14:0] heat_window */ \
    bit<32> heat_count;     /* heat_t.count */ \
    bit<1>  current;        /* the slot is still the one for which the frame went round */ \
    bit<1>  passing;        /* only goes round: gathers or stores a chunk */ \
    bit<1>  heat_on;        /* the threshold can be reached */ \
    bit<16> row_index;      /* of the row to be read or written, in the cells' registers */ \
    bit<8>  row_bank;       /* and which registers (the header's fields change meanwhile) */ \
    bit<16> first_row;      /* index of row 0 of the chunk in the cells' registers */ \
    bit<8>  bank;           /* of the cells */ \
    bit<16> loop_group;     /* multicast group of this pipe's recirculation port */ \
    bit<9>  loop_port;      /* this pipe's recirculation port */

#ifdef KVCAST_TOFINO2
#define BANK_SLOTS 64
#define CELL_BANKS(M, n, part) M(n, part, _lower, 0) M(n, part, _upper, 1)
#define APPLY_BANKS(n) word##n##_lower.apply(); word##n##_upper.apply();
#else
#define BANK_SLOTS SLOTS
#define CELL_BANKS(M, n, part) M(n, part, _whole, 0)
#define APPLY_BANKS(n) word##n##_whole.apply();
#endif
// Cells of one bank: what lies between the rows of a chunk.
#define ROW_STRIDE (BANK_SLOTS * 64)

// Which READs can become DATA, by their flags: those without padding. A packet may grow here, and
// nothing would take the padding off again.
#define SERVABLE_FLAGS 0 &&& FLAG_PADDED

#endif
