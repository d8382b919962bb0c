// Decides whether a segment has a slot in the switch's cells, and which copy of it. The direct
// counter counts lookups, by READs and DATA alike; hits are counted where they are served.

control ResidentLookup(in headers_t hdr, inout meta_t meta) {
    direct_counter(CounterType.packets) resident_lookups;
    action resident_at(bit<32> slot, bit<32> generation, bit<64> chunk_mask, bit<64> digest,
                       bit<32> size) {
        meta.resident = 1;
        meta.slot = slot;
        meta.generation = generation;
        meta.chunk_mask = chunk_mask;
        meta.resident_digest = digest;
        meta.resident_size = size;
        resident_lookups.count();
    }
    action not_resident() { meta.resident = 0; }
    table resident {
        key = {
            hdr.kvcast.namespace : exact;
            hdr.kvcast.key : exact;
            hdr.kvcast.segment : exact;
        }
        actions = { resident_at; not_resident; }
        const default_action = not_resident();
        counters = resident_lookups;
        size = SLOTS;
    }
    apply { resident.apply(); }
}
