// Calls of methods by their paths, with whatever bytes.
#pragma once

#include <google/protobuf/descriptor.h>
#include <grpcpp/grpcpp.h>

#include <map>
#include <memory>
#include <string>

namespace ringleader::api::testing {

// By their paths, all methods of the services that a coordinator has.
std::map<std::string, const google::protobuf::MethodDescriptor*> ServedMethods();

// One message, empty unless it is given, to any method: how the call ends, after its first answer
// at the latest, and whether there was one.
grpc::Status CallRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& path,
                     const std::string& message = "", bool* is_answered = nullptr);

}  // namespace ringleader::api::testing
