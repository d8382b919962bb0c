// Decides what a kvcast frame is, from its op, flags and lengths, or that it is malformed. The rules
// are those of `decode` in protocol/messages/wire.py: a frame that an agent would refuse changes
// nothing in the switch. Runs on every frame with a kvcast header that comes from outside; Gate uses
// the result. Chunks larger than a cell (their size is in the segment's two highest bits) coalesce like
// any others, and neither fill switch memory nor come from it.

const bit<16> READ_LENGTH     = UDP_BYTES + KVCAST_BYTES;
const bit<16> PADDED_LENGTH   = UDP_BYTES + KVCAST_BYTES + READ_PADDING_BYTES;
const bit<16> DATA_LENGTH_0   = UDP_BYTES + KVCAST_BYTES + CHUNK_BYTES;
const bit<16> DATA_LENGTH_1   = UDP_BYTES + KVCAST_BYTES + 2 * CHUNK_BYTES;
const bit<16> DATA_LENGTH_2   = UDP_BYTES + KVCAST_BYTES + 4 * CHUNK_BYTES;
const bit<16> DATA_LENGTH_3   = UDP_BYTES + KVCAST_BYTES + 8 * CHUNK_BYTES;
const bit<16> MISS_LENGTH     = UDP_BYTES + KVCAST_BYTES;
const bit<16> WRITTEN_LENGTH  = UDP_BYTES + KVCAST_BYTES;
const bit<16> OFFER_LENGTH    = UDP_BYTES + KVCAST_BYTES + OFFER_BYTES;

const bit<16> DATA_FLAGS = FLAG_PARTIAL | FLAG_LAST | FLAG_SHARED | FLAG_RESIDENT;
const bit<16> MISS_FLAGS = FLAG_PARTIAL | FLAG_SHARED | FLAG_WRITE;
// Bits that must be as the entry says; the complement is free.
const bit<16> READ_FIXED = ~(FLAG_RETRY | FLAG_SHARED);
const bit<16> DATA_FIXED = ~(DATA_FLAGS & ~(FLAG_PARTIAL | FLAG_LAST));
const bit<16> PART_FIXED = ~(DATA_FLAGS & ~FLAG_PARTIAL);
const bit<16> MISS_FIXED = ~(MISS_FLAGS & ~FLAG_PARTIAL);

control FrameClass(inout headers_t hdr, inout local_metadata_t local_metadata) {
    action classify(bit<8> kind, bit<1> is_answer, bit<1> has_memory, bit<1> coalesces) {
        local_metadata.kind = kind;
        local_metadata.is_answer = is_answer;
        local_metadata.has_memory = has_memory;
        local_metadata.coalesces = coalesces;
    }

    action malformed() {
        local_metadata.kind = KIND_MALFORMED;
    }

    @name(".frame_class")
    table frame_class {
        key = {
            hdr.kvcast.version     : exact;
            local_metadata.broken  : exact;
            local_metadata.damaged : exact;
            hdr.ipv4.version       : exact   @name("ip_version");  // finsy wants last components unique
            hdr.ipv4.flags         : ternary @name("ip_flags");  // lowest bit: more fragments follow
            local_metadata.misfit  : exact;
            hdr.kvcast.op          : exact;
            hdr.kvcast.flags       : ternary;
            hdr.kvcast.segment[15:14] : ternary @name("chunk_code");
            hdr.ipv4.total_length  : exact   @name("ip_length");
            hdr.udp.length         : exact;
            hdr.kvcast.chunk       : ternary;
            hdr.kvcast.wanted      : ternary;
        }
        actions = { classify; malformed; }
        const default_action = malformed();
        const entries = {
// The UDP datagram fills the IPv4 packet.
#define IN_IP(udp_length) IPV4_BYTES + udp_length, udp_length
#define WHOLE KVCAST_VERSION, 0, 0, 4, 0 &&& 1, 0
            //      op        flags                            code length                 chunk     wanted             kind              answer memory coalesces
            (WHOLE, OP_DATA,  0 &&& DATA_FIXED,                    0,  IN_IP(DATA_LENGTH_0),  0 &&& 0xC0, 0)            : classify(KIND_DATA,         1, 1, 1);
            (WHOLE, OP_DATA,  FLAG_LAST &&& DATA_FIXED,            0,  IN_IP(DATA_LENGTH_0),  0 &&& 0xC0, 0)            : classify(KIND_LAST_DATA,    1, 1, 1);
            (WHOLE, OP_DATA,  FLAG_PARTIAL &&& PART_FIXED,         0,  IN_IP(DATA_LENGTH_0),  0 &&& 0xC0, 0)            : classify(KIND_PLAIN_DATA,   1, 1, 0);
            (WHOLE, OP_DATA,  0 &&& DATA_FIXED,                    1,  IN_IP(DATA_LENGTH_1),  0 &&& 0xC0, 0)            : classify(KIND_DATA,         1, 0, 1);
            (WHOLE, OP_DATA,  FLAG_LAST &&& DATA_FIXED,            1,  IN_IP(DATA_LENGTH_1),  0 &&& 0xC0, 0)            : classify(KIND_LAST_DATA,    1, 0, 1);
            (WHOLE, OP_DATA,  FLAG_PARTIAL &&& PART_FIXED,         1,  IN_IP(DATA_LENGTH_1),  0 &&& 0xC0, 0)            : classify(KIND_PLAIN_DATA,   1, 0, 0);
            (WHOLE, OP_DATA,  0 &&& DATA_FIXED,                    2,  IN_IP(DATA_LENGTH_2),  0 &&& 0xC0, 0)            : classify(KIND_DATA,         1, 0, 1);
            (WHOLE, OP_DATA,  FLAG_LAST &&& DATA_FIXED,            2,  IN_IP(DATA_LENGTH_2),  0 &&& 0xC0, 0)            : classify(KIND_LAST_DATA,    1, 0, 1);
            (WHOLE, OP_DATA,  FLAG_PARTIAL &&& PART_FIXED,         2,  IN_IP(DATA_LENGTH_2),  0 &&& 0xC0, 0)            : classify(KIND_PLAIN_DATA,   1, 0, 0);
            (WHOLE, OP_DATA,  0 &&& DATA_FIXED,                    3,  IN_IP(DATA_LENGTH_3),  0 &&& 0xC0, 0)            : classify(KIND_DATA,         1, 0, 1);
            (WHOLE, OP_DATA,  FLAG_LAST &&& DATA_FIXED,            3,  IN_IP(DATA_LENGTH_3),  0 &&& 0xC0, 0)            : classify(KIND_LAST_DATA,    1, 0, 1);
            (WHOLE, OP_DATA,  FLAG_PARTIAL &&& PART_FIXED,         3,  IN_IP(DATA_LENGTH_3),  0 &&& 0xC0, 0)            : classify(KIND_PLAIN_DATA,   1, 0, 0);
            (WHOLE, OP_READ,  0 &&& READ_FIXED,                    _,  IN_IP(READ_LENGTH),    0,         FULL_SEGMENT) : classify(KIND_READ,         0, 1, 1);
            (WHOLE, OP_READ,  FLAG_PADDED &&& READ_FIXED,          _,  IN_IP(PADDED_LENGTH),  0,         FULL_SEGMENT) : classify(KIND_READ,         0, 1, 1);
            (WHOLE, OP_READ,  FLAG_WRITE &&& READ_FIXED,      WRITE_CHUNK_CODE, IN_IP(READ_LENGTH),    0,         FULL_SEGMENT) : classify(KIND_READ,         0, 0, 1);
            (WHOLE, OP_READ,  _,                                   _,  IN_IP(READ_LENGTH),    _,         FULL_SEGMENT) : malformed();
            (WHOLE, OP_READ,  _,                                   _,  IN_IP(PADDED_LENGTH),  _,         FULL_SEGMENT) : malformed();
            (WHOLE, OP_READ,  _,                                   _,  IN_IP(READ_LENGTH),    _,         0)            : malformed();
            (WHOLE, OP_READ,  _,                                   _,  IN_IP(PADDED_LENGTH),  _,         0)            : malformed();
            (WHOLE, OP_READ,  FLAG_PARTIAL,                        _,  IN_IP(READ_LENGTH),    0,         _)            : classify(KIND_PARTIAL_READ, 0, 1, 0);
            (WHOLE, OP_READ,  FLAG_PARTIAL | FLAG_PADDED,          _,  IN_IP(PADDED_LENGTH),  0,         _)            : classify(KIND_PARTIAL_READ, 0, 1, 0);
            (WHOLE, OP_MISS,  0 &&& MISS_FIXED,                    _,  IN_IP(MISS_LENGTH),    _,         0)            : classify(KIND_MISS,         1, 0, 1);
            (WHOLE, OP_MISS,  FLAG_PARTIAL &&& MISS_FIXED,         _,  IN_IP(MISS_LENGTH),    _,         0)            : classify(KIND_PLAIN_ANSWER, 1, 0, 0);
            (WHOLE, OP_WRITTEN, FLAG_WRITE &&& ~FLAG_SHARED,  WRITE_CHUNK_CODE, IN_IP(WRITTEN_LENGTH), 0,        0)            : classify(KIND_LAST_DATA,    1, 0, 1);
            (WHOLE, OP_OFFER, 0,                                   _,  IN_IP(OFFER_LENGTH),   0,         0)            : classify(KIND_PLAIN_ANSWER, 1, 0, 0);
#undef WHOLE
#undef IN_IP
        }
    }

    apply {
        frame_class.apply();
    }
}
