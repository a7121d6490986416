// gRPC settings of the streams between trainers.
#pragma once

#include <grpcpp/server_builder.h>
#include <grpcpp/support/channel_arguments.h>

namespace ringleader::comm {

// A connection per channel; large messages and windows; a silent peer is noticed within 20 s.
grpc::ChannelArguments PeerChannelArguments();
void SetPeerServerArguments(grpc::ServerBuilder* builder);

}  // namespace ringleader::comm
