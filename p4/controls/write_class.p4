// Finds out whether a RoCE packet is a home's for whoever waits, or is for a reader's landing zone,
// which none may reach but through the switch. All other RDMA is ordinary traffic. Runs beside
// FrameClass; Gate uses the result. A home is told by its port and address, as for kvcast frames; that
// it may write to a reader, by an entry of WriteCopy.

control WriteClass(inout headers_t hdr, inout local_metadata_t local_metadata) {
    @name(".to_pool")
    action to_pool() {
        local_metadata.kind = KIND_WRITE;
        local_metadata.is_answer = 1;
        local_metadata.coalesces = 1;
    }

    @name(".to_zone")
    action to_zone() {
        local_metadata.kind = KIND_TO_ZONE;
    }

    @name(".other_rdma")
    action other_rdma() { }

    @name(".rdma_target")
    table rdma_target {
        key = {
            hdr.ipv4.dst       : exact;
            hdr.bth.queue_pair : exact @name("queue_pair");
        }
        actions = { to_pool; to_zone; other_rdma; }
        const default_action = other_rdma();
        size = RDMA_TARGETS;
    }

    action well_formed() {
        local_metadata.formed = 1;
    }

    action ill_formed() { }

    // A chunk's address and no other, since the entry decides which slot may be written.
    @name(".write_form")
    table write_form {
        key = {
            local_metadata.broken  : exact;
            local_metadata.damaged : exact;
            hdr.ipv4.version       : exact @name("ip_version");
            hdr.ipv4.flags         : ternary @name("ip_flags");   // no more fragments
            hdr.bth.opcode         : exact;
            hdr.write.address_high : exact;
            hdr.write.address_mid  : ternary;
            hdr.write.address_low  : ternary;
            hdr.write.key          : exact @name("write_key");
        }
        actions = { well_formed; ill_formed; }
        const default_action = ill_formed();
        const entries = {
            (0, 0, 4, 0 &&& 1, UC_WRITE_ONLY_WITH_IMMEDIATE, ZONE_ADDRESS_HIGH,
             0 &&& ADDRESS_MID_ZEROS, 0 &&& ADDRESS_LOW_ZEROS, POOL_KEY) : well_formed();
        }
    }

    apply {
        rdma_target.apply();
        write_form.apply();
    }
}
