// kvcast on v1model (BMv2's simple_switch, and kvcast's own software switch).
//
// A top-of-rack switch that also knows the reads of a pool of immutable blocks: it holds back a
// read whose answer is on the way, sends that answer to everybody who waits, and answers from its
// own memory what is read most. It is on the path and never in the way: without it the same frames
// reach the same hosts.

#include "arch.p4"
#include "../types.p4"
#include "headers.p4"
#include "parser.p4"
#include "../controls/settings.p4"
#include "../controls/frame_class.p4"
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
#include "../controls/served_data.p4"
#include "delivery.p4"
#include "checksums.p4"

parser KvcastParser(packet_in packet, out headers_t hdr, inout state_t state,
              inout standard_metadata_t standard) {
    FrameParser() frame;

    state start {
        frame.apply(packet, hdr);
        transition accept;
    }
}

control KvcastIngress(inout headers_t hdr, inout state_t state, inout standard_metadata_t standard) {
    Arrival() arrival;
    Settings() settings;
    FrameClass() frame_class;
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
        // What is it, and may it?
        arrival.apply(hdr, state, standard);
        if (standard.instance_type == INSTANCE_RECIRCULATED) {
            state.has_memory = 1;
        } else {
            settings.apply(state);
            if (state.enabled == 1) {
                if (hdr.kvcast.isValid()) {
                    frame_class.apply(hdr, state);
                    port_guard.apply(hdr, state, standard.ingress_port);
                }
                gate.apply(state);
                if (state.kind == KIND_READ) {
                    reader_group.apply(hdr, state);
                }
            }
        }

        // Switch memory: fill from DATA, answer READs.
        if (state.has_memory == 1) {
            resident.apply(hdr, state);
            if (standard.instance_type == INSTANCE_RECIRCULATED) {
                serving_pass.apply(hdr, state, state.serving_generation);
            } else if (state.resident == 1) {
                chunk_bit.apply(hdr, state);
                fill_decision.apply(hdr, state);
                slot_validity.apply(state);
                serving_decision.apply(hdr, state);
            }
            if (state.serving == 1) {
                lowest_chunk.apply(hdr, state);
                state.group = state.serve_group;
            }
            if (state.serving == 1 || state.fill == FILL_FILLED) {
                cells.apply(hdr, state);
            }
        }

        // Everything else goes where it is addressed, unless its answer is on the way, or others
        // wait for it too.
        if (state.decision == DECISION_NONE) {
            forwarding.apply(hdr, state);
            route.apply(state);
            if (state.coalesces == 1) {
                block_hash.apply(hdr, state);
                pending.apply(hdr, state);
                if (state.demand == 1 && state.heat_threshold != 0) {
                    heat.apply(hdr, state);
                }
                if (state.delivery == DELIVER_SHARED) {
                    port_set.apply(state, state.port_bits);
                }
            }
        }

        decisions.apply(state);
        delivery.apply(state, standard);
    }
}

control KvcastEgress(inout headers_t hdr, inout state_t state, inout standard_metadata_t standard) {
    EgressHost() egress_host;
    ServedData() served_data;
    ServeAgain() serve_again;

    apply {
        if (state.delivery >= DELIVER_SERVE) {
            // A chunk from switch memory leaves by every copy but one, which fetches the next.
            if (state.delivery != DELIVER_SHARED) {
                if (standard.egress_rid == RECIRCULATE_RID) {
                    serve_again.apply(hdr, state, standard);
                } else {
                    served_data.apply(hdr, state);
                    hdr.padding.setInvalid();
                }
            }
            if (state.delivery >= DELIVER_SERVE_GROUP && standard.egress_rid != RECIRCULATE_RID) {
                egress_host.apply(hdr, state, standard.egress_port);
                if (state.member == 0) {
                    mark_to_drop(standard);
                }
            }
        } else if (state.delivery == DELIVER_FLOOD) {
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
