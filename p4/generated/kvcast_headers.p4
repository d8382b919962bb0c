// Generated from protocol/messages/wire.py by `python -m kvcast.p4.generate`; do not edit.

#ifndef KVCAST_GENERATED_KVCAST_HEADERS_P4_
#define KVCAST_GENERATED_KVCAST_HEADERS_P4_

// datagrams
const bit<16> ETHERTYPE_IPV4 = 0x0800;
const bit<8> IP_PROTOCOL_UDP = 0x11;
const bit<16> KVCAST_UDP_PORT = 0x4b56;
const bit<8> KVCAST_VERSION = 0x01;

// op
const bit<8> OP_READ = 0x01;
const bit<8> OP_DATA = 0x02;
const bit<8> OP_MISS = 0x03;
const bit<8> OP_OFFER = 0x04;
const bit<8> OP_WRITTEN = 0x05;

// flags
const bit<16> FLAG_RETRY = 0x0001;
const bit<16> FLAG_PARTIAL = 0x0002;
const bit<16> FLAG_LAST = 0x0004;
const bit<16> FLAG_SHARED = 0x0008;
const bit<16> FLAG_PADDED = 0x0010;
const bit<16> FLAG_RESIDENT = 0x0020;
const bit<16> FLAG_WRITE = 0x0040;

// reasons of a MISS, in its chunk field
const bit<8> MISS_NOT_FOUND = 0x01;
const bit<8> MISS_DIGEST_GONE = 0x02;
const bit<8> MISS_OVERLOADED = 0x03;
const bit<8> MISS_NOT_HOME = 0x04;
const bit<8> MISS_CHUNK_SIZE = 0x05;
const bit<8> MISS_NO_WRITE = 0x06;

// sizes, in bytes unless the name says otherwise
const bit<64> FULL_SEGMENT = 0xffffffffffffffff;
const bit<8> CHUNKS_PER_SEGMENT = 0x40;
const bit<16> CHUNK_BYTES = 0x0400;
const bit<16> ETHERNET_BYTES = 0x000e;
const bit<16> IPV4_BYTES = 0x0014;
const bit<16> UDP_BYTES = 0x0008;
const bit<16> KVCAST_BYTES = 0x0034;
const bit<16> READ_PADDING_BYTES = 0x0260;
const bit<16> OFFER_BYTES = 0x0018;

// a key's bucket is its low BUCKET_BITS bits: key[BUCKET_BITS-1:0]
#define BUCKET_BITS 10

// IEEE 802.3
header ethernet_h {
    bit<48> dst;
    bit<48> src;
    bit<16> ether_type;
}

// RFC 791, without options
header ipv4_h {
    bit<4> version;
    bit<4> ihl;             // 5: kvcast datagrams carry no options
    bit<6> dscp;
    bit<2> ecn;
    bit<16> total_length;
    bit<16> identification;
    bit<3> flags;
    bit<13> fragment_offset;
    bit<8> ttl;
    bit<8> protocol;
    bit<16> checksum;
    bit<32> src;
    bit<32> dst;
}

// RFC 768; checksum 0 (none) in kvcast datagrams
header udp_h {
    bit<16> src_port;
    bit<16> dst_port;
    bit<16> length;
    bit<16> checksum;
}

// the kvcast header, after UDP
header kvcast_h {
    bit<8> version;         // 1
    bit<8> op;              // OP_*
    bit<16> flags;          // FLAG_*
    bit<16> namespace;      // tenant, model, version and layout, as assigned by the controller
    bit<16> group;          // reader group, 0 = none; DATA echoes the READ's
    bit<128> key;           // the block within its namespace
    bit<64> digest;         // xxh3_64 of the copy; READ: the copy wanted, 0 = any; MISS: echo
    bit<32> size;           // block size in bytes (DATA, OFFER), else 0
    bit<16> segment;        // chunks of 1024 << (bits 15, 14) bytes; segment index
    bit<8> chunk;           // DATA: index in the segment; MISS: reason; else 0
    bit<8> gather;          // READ: ms for which the home may hold its answer for joiners; else 0
    bit<64> wanted;         // READ: bit i = chunk i; FULL_SEGMENT = all there are; else 0
    bit<32> tag;            // READ: the requester's; echoed in DATA, MISS and OFFER
}

// a chunk, as four of the widest words that p4c takes
header cell_h {
    bit<2048> w0;
    bit<2048> w1;
    bit<2048> w2;
    bit<2048> w3;
}

// follows the kvcast header of a PADDED READ
header read_padding_h {
    bit<2048> p0;
    bit<2048> p1;
    bit<768> p2;
}

// payload of an OFFER: another way to fetch the block
header offer_h {
    bit<8> kind;            // OFFER_*
    bit<8> reserved;        // 0
    bit<16> port;           // TCP port, or 0
    bit<32> ipv4;           // where the port listens
    bit<64> token;          // rkey (RDMA) or access token (TCP)
    bit<64> address;        // remote address (RDMA), else 0
}

#endif
