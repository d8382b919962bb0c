// kvcast on v1model (BMv2's simple_switch, and kvcast's own software switch).
//
// A top-of-rack switch that also takes part in the reads of a pool of immutable blocks. It holds back
// a READ whose answer is on the way, sends that answer to everybody who waits, and answers the
// READs that are most frequent from its own memory. Without it the same frames reach the same hosts.

#include "arch.p4"
#include "../types.p4"
#include "headers.p4"
#include "parser.p4"
#include "../controls/settings.p4"
#include "../controls/frame_class.p4"
#include "../controls/write_class.p4"
#include "../controls/port_guard.p4"
#include "../controls/gate.p4"
#include "../controls/reader_group.p4"
#include "../controls/resident.p4"
#include "../controls/chunk_bit.p4"
#include "../controls/fill_decision.p4"
#include "slots.p4"
#include "../controls/serving_decision.p4"
#include "../controls/serving_pass.p4"
#include "../controls/lowest_chunk.p4"
#include "cells.p4"
#include "../controls/forwarding.p4"
#include "../controls/route.p4"
#include "block_hash.p4"
#include "pending.p4"
#include "heat.p4"
#include "../controls/port_set.p4"
#include "../controls/decisions.p4"
#include "../controls/egress_host.p4"
#include "../controls/write_copy.p4"
#include "../controls/served_data.p4"
#include "delivery.p4"
#include "checksums.p4"

parser KvcastParser(packet_in packet, out headers_t hdr, inout local_metadata_t local_metadata,
              inout standard_metadata_t standard) {
    FrameParser() frame;

    state start {
        frame.apply(packet, hdr);
        transition accept;
    }
}

control KvcastIngress(inout headers_t hdr, inout local_metadata_t local_metadata,
                      inout standard_metadata_t standard) {
    Arrival() arrival;
    Settings() settings;
    FrameClass() frame_class;
    WriteClass() write_class;
    PortGuard() port_guard;
    Gate() gate;
    ReaderGroup() reader_group;
    Resident() resident;
    ChunkBit() chunk_bit;
    FillDecision() fill_decision;
    SlotValidity() slot_validity;
    ServingDecision() serving_decision;
    ServingPass() serving_pass;
    LowestChunk() lowest_chunk;
    Cells() cells;
    Forwarding() forwarding;
    Route() route;
    BlockHash() block_hash;
    Pending() pending;
    Heat() heat;
    PortSet() port_set;
    Decisions() decisions;
    Delivery() delivery;

    apply {
        // What is the frame, and may its sender send it?
        arrival.apply(hdr, local_metadata, standard);
        if (standard.instance_type == INSTANCE_RECIRCULATED) {
            local_metadata.has_memory = 1;
        } else {
            settings.apply(local_metadata);
            // Other frames are ordinary traffic as they stand, but for those that the parser gave up.
            if (local_metadata.enabled == 1
                && (hdr.kvcast.isValid() || hdr.bth.isValid() || local_metadata.broken == 1)) {
                if (hdr.kvcast.isValid()) {
                    frame_class.apply(hdr, local_metadata);
                } else if (hdr.bth.isValid()) {
                    write_class.apply(hdr, local_metadata);
                }
                port_guard.apply(hdr, local_metadata, standard.ingress_port);
                gate.apply(local_metadata);
                if (local_metadata.kind == KIND_READ) {
                    reader_group.apply(hdr, local_metadata);
                }
            }
        }

        // Switch memory: fill from DATA, answer READs.
        if (local_metadata.has_memory == 1) {
            resident.apply(hdr, local_metadata);
            if (standard.instance_type == INSTANCE_RECIRCULATED) {
                serving_pass.apply(hdr, local_metadata, local_metadata.serving_generation);
            } else if (local_metadata.resident == 1) {
                chunk_bit.apply(hdr, local_metadata);
                fill_decision.apply(hdr, local_metadata);
                slot_validity.apply(local_metadata);
                serving_decision.apply(hdr, local_metadata);
            }
            if (local_metadata.serving == 1) {
                lowest_chunk.apply(hdr, local_metadata);
                local_metadata.group = local_metadata.serve_group;
            }
            if (local_metadata.serving == 1 || local_metadata.fill == FILL_FILLED) {
                cells.apply(hdr, local_metadata);
            }
        }

        // Everything else goes where it is addressed, except a READ whose answer is on the way, and
        // an answer for which others wait too.
        if (local_metadata.decision == DECISION_NONE) {
            forwarding.apply(hdr, local_metadata);
            route.apply(local_metadata);
            if (local_metadata.coalesces == 1) {
                block_hash.apply(hdr, local_metadata);
                pending.apply(hdr, local_metadata);
                if (local_metadata.demand == 1 && local_metadata.heat_threshold != 0) {
                    heat.apply(hdr, local_metadata);
                }
                if (local_metadata.delivery >= DELIVER_SHARED) {
                    port_set.apply(local_metadata, local_metadata.port_bits);
                }
            }
        }

        decisions.apply(local_metadata);
        delivery.apply(local_metadata, standard);
    }
}

control KvcastEgress(inout headers_t hdr, inout local_metadata_t local_metadata,
                     inout standard_metadata_t standard) {
    EgressHost() egress_host;
    WriteCopy() write_copy;
    ServedData() served_data;
    ServeAgain() serve_again;

    apply {
        if (local_metadata.delivery >= DELIVER_SERVE) {
            // A chunk from switch memory leaves by every copy but one, which fetches the next.
            if (local_metadata.delivery < DELIVER_SHARED) {
                if (standard.egress_rid == RECIRCULATE_RID) {
                    serve_again.apply(hdr, local_metadata, standard);
                } else {
                    served_data.apply(hdr, local_metadata);
                    hdr.padding.setInvalid();
                }
            }
            if (local_metadata.delivery >= DELIVER_SERVE_GROUP
                && standard.egress_rid != RECIRCULATE_RID) {
                if (local_metadata.delivery == DELIVER_WRITE_SHARED) {
                    write_copy.apply(hdr, local_metadata, standard.ingress_port,
                        standard.egress_port);
                } else {
                    egress_host.apply(hdr, local_metadata, standard.egress_port);
                }
                if (local_metadata.member == 0) {
                    mark_to_drop(standard);
                }
            }
        } else if (local_metadata.delivery == DELIVER_FLOOD) {
            if (standard.egress_port == standard.ingress_port) {
                mark_to_drop(standard);
            }
        }
    }
}

control KvcastDeparser(packet_out packet, in headers_t hdr) {
    FrameDeparser() frame;

    apply {
        frame.apply(packet, hdr);
    }
}

V1Switch(KvcastParser(), VerifyIPv4(), KvcastIngress(), KvcastEgress(), ComputeIPv4(),
         KvcastDeparser()) main;
