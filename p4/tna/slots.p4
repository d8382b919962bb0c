// Which chunks of a slot are stored (v1model/slots.p4 says more): a dual stateful ALU for chunks 0 to
// 31 and one for 32 to 63, each with the generation under which they were stored. A READ reads them;
// the last row of a chunk sets its bit, so that a chunk of which only a part was stored never shows.

struct slot_chunks_t {
    bit<32> generation;
    bit<32> chunks;         // bit i: chunk i (or 32 + i)
}

control SlotValidity(inout headers_t hdr, inout local_metadata_t local_metadata) {
    Register<slot_chunks_t, bit<16>>(SLOTS) valid_low;
    Register<slot_chunks_t, bit<16>>(SLOTS) valid_high;

    RegisterAction<slot_chunks_t, bit<16>, bit<32>>(valid_low) read_low = {
        void apply(inout slot_chunks_t slot, out bit<32> chunks) {
            chunks = 0;
            if (slot.generation == local_metadata.generation) {
                chunks = slot.chunks;
            }
        }
    };

    RegisterAction<slot_chunks_t, bit<16>, bit<32>>(valid_high) read_high = {
        void apply(inout slot_chunks_t slot, out bit<32> chunks) {
            chunks = 0;
            if (slot.generation == local_metadata.generation) {
                chunks = slot.chunks;
            }
        }
    };

    RegisterAction<slot_chunks_t, bit<16>, bit<32>>(valid_low) store_low = {
        void apply(inout slot_chunks_t slot) {
            if (slot.generation == local_metadata.generation) {
                slot.chunks = slot.chunks | local_metadata.chunk_bit[31:0];
            } else {
                slot.chunks = local_metadata.chunk_bit[31:0];
            }
            slot.generation = local_metadata.generation;
        }
    };

    RegisterAction<slot_chunks_t, bit<16>, bit<32>>(valid_high) store_high = {
        void apply(inout slot_chunks_t slot) {
            if (slot.generation == local_metadata.generation) {
                slot.chunks = slot.chunks | local_metadata.chunk_bit[63:32];
            } else {
                slot.chunks = local_metadata.chunk_bit[63:32];
            }
            slot.generation = local_metadata.generation;
        }
    };

    action do_read_low()   { local_metadata.valid[31:0] = read_low.execute(local_metadata.slot); }
    action do_read_high()  { local_metadata.valid[63:32] = read_high.execute(local_metadata.slot); }
    action do_store_low()  { store_low.execute(local_metadata.slot); }
    action do_store_high() { store_high.execute(local_metadata.slot); }

#define STEP(part) \
    @hidden \
    table step_##part { \
        key = { \
            hdr.round.task          : exact; \
            hdr.round.row           : ternary; \
            local_metadata.resident : exact; \
            local_metadata.current  : ternary; \
        } \
        actions = { do_read_##part; do_store_##part; @defaultonly NoAction; } \
        const default_action = NoAction(); \
        const entries = { \
            (TASK_NONE,  _,        1, _) : do_read_##part(); \
            (TASK_STORE, LAST_ROW, 1, 1) : do_store_##part(); \
        } \
        size = 2; \
    }
    STEP(low)
    STEP(high)
#undef STEP

    apply {
        step_low.apply();
        step_high.apply();
    }
}
