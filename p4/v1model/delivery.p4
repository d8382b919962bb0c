// Turns what was decided into v1model's intrinsic metadata: Arrival at the start of ingress,
// Delivery at its end, ServeAgain in egress.

// BMv2: simple_switch's PKT_INSTANCE_TYPE_RECIRC. Set by the switch alone, so no host can send a
// frame that looks as if it came round.
const bit<32> INSTANCE_RECIRCULATED = 4;

// A tick is 64 us: v1model stamps in microseconds.
#define TICK_SHIFT 6

control Arrival(inout headers_t hdr, inout local_metadata_t local_metadata,
                inout standard_metadata_t standard) {
    apply {
        local_metadata.now = (bit<32>)(standard.ingress_global_timestamp >> TICK_SHIFT);
        local_metadata.broken = (bit<1>)(standard.parser_error != error.NoError);
        local_metadata.damaged = standard.checksum_error;
        local_metadata.misfit = (bit<1>)(
            (bit<16>)standard.packet_length - hdr.ipv4.total_length != ETHERNET_BYTES);
    }
}

// The replica of a READ that goes round for its next chunk, if there is one.
control ServeAgain(inout headers_t hdr, inout local_metadata_t local_metadata,
                   inout standard_metadata_t standard) {
    apply {
        if (local_metadata.last == 1) {
            mark_to_drop(standard);
        } else {
            hdr.cell.setInvalid();
            recirculate_preserving_field_list(1);
        }
    }
}

control Delivery(inout local_metadata_t local_metadata, inout standard_metadata_t standard) {
    apply {
        if (local_metadata.delivery == DELIVER_UNICAST) {
            standard.egress_spec = local_metadata.out_port;
        } else if (local_metadata.delivery == DELIVER_NOWHERE) {
            mark_to_drop(standard);
        } else {
            standard.mcast_grp = local_metadata.group;
        }
    }
}
