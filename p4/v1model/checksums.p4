// The IPv4 header checksum (RFC 791): verified on arrival, made anew where a header was rewritten.

#define IPV4_FIELDS { hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.dscp, hdr.ipv4.ecn, \
    hdr.ipv4.total_length, hdr.ipv4.identification, hdr.ipv4.flags, hdr.ipv4.fragment_offset, \
    hdr.ipv4.ttl, hdr.ipv4.protocol, hdr.ipv4.src, hdr.ipv4.dst }

control VerifyIPv4(inout headers_t hdr, inout local_metadata_t local_metadata) {
    apply {
        verify_checksum(hdr.ipv4.isValid() && hdr.ipv4.ihl == IPV4_WORDS, IPV4_FIELDS,
            hdr.ipv4.checksum, HashAlgorithm.csum16);
    }
}

control ComputeIPv4(inout headers_t hdr, inout local_metadata_t local_metadata) {
    apply {
        update_checksum(local_metadata.rewritten == 1, IPV4_FIELDS,
            hdr.ipv4.checksum, HashAlgorithm.csum16);
    }
}
