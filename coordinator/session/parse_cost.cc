#include "coordinator/session/parse_cost.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/message.h>
#include <google/protobuf/unknown_field_set.h>
#include <google/protobuf/wire_format_lite.h>

#include <cstdint>
#include <string>
#include <unordered_map>

namespace ringleader::session {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::UnknownField;
using google::protobuf::UnknownFieldSet;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

constexpr int kMaxDepth = 100;  // protobuf's
// A list of pointers that has just grown is half empty.
constexpr size_t kListEntry = 2 * sizeof(void*);

class Walk {
 public:
  Walk(CodedInputStream* wire, size_t max_bytes) : wire_(*wire), max_bytes_(max_bytes) {}

  // Up to the end of the message, or of the group. `type`: null for an unknown group. Returns
  // whether it was well-formed as far as it was read.
  bool Add(const Descriptor* type, int depth) {
    if (depth > kMaxDepth) return false;
    while (const uint32_t tag = wire_.ReadTag()) {
      if (cost_.bytes > max_bytes_) return true;
      if (WireFormatLite::GetTagWireType(tag) == WireFormatLite::WIRETYPE_END_GROUP) {
        return type == nullptr;
      }
      const FieldDescriptor* const field =
          type == nullptr ? nullptr
                          : type->FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
      if (!AddField(field, tag, depth)) return false;
    }
    return type != nullptr && wire_.ConsumedEntireMessage();
  }
  bool exceeded() const { return cost_.bytes > max_bytes_; }
  const ParseCost& cost() const { return cost_; }

 private:
  bool AddField(const FieldDescriptor* field, uint32_t tag, int depth) {
    if (field == nullptr) {
      cost_.has_unknown = true;
      cost_.bytes += 2 * sizeof(UnknownField);
    }
    switch (WireFormatLite::GetTagWireType(tag)) {
      case WireFormatLite::WIRETYPE_VARINT: {
        uint64_t value = 0;
        if (field != nullptr && field->is_repeated()) cost_.bytes += kListEntry;
        return wire_.ReadVarint64(&value);
      }
      case WireFormatLite::WIRETYPE_FIXED64:
        if (field != nullptr && field->is_repeated()) cost_.bytes += kListEntry;
        return wire_.Skip(sizeof(uint64_t));
      case WireFormatLite::WIRETYPE_FIXED32:
        if (field != nullptr && field->is_repeated()) cost_.bytes += kListEntry;
        return wire_.Skip(sizeof(uint32_t));
      case WireFormatLite::WIRETYPE_LENGTH_DELIMITED: {
        uint32_t length = 0;
        return wire_.ReadVarint32(&length) && AddBytes(field, length, depth);
      }
      case WireFormatLite::WIRETYPE_START_GROUP:  // of no field of ours
        cost_.has_unknown = true;
        cost_.bytes += 2 * sizeof(UnknownField) + sizeof(UnknownFieldSet);
        return Add(nullptr, depth + 1);
      case WireFormatLite::WIRETYPE_END_GROUP:  // Add()
        return false;
    }
    return false;  // wire types 6 and 7 do not exist
  }

  bool AddBytes(const FieldDescriptor* field, uint32_t length, int depth) {
    if (length > INT32_MAX) return false;
    const int bytes = static_cast<int>(length);
    if (field != nullptr && field->type() == FieldDescriptor::TYPE_MESSAGE) {
      cost_.bytes += kListEntry + EmptyBytes(field->message_type());
      const CodedInputStream::Limit outer = wire_.PushLimit(bytes);
      const bool well_formed =
          Add(field->message_type(), depth + 1) && (exceeded() || wire_.BytesUntilLimit() == 0);
      wire_.PopLimit(outer);
      return well_formed;
    }
    const bool packed = field != nullptr && field->is_packable();
    // Each byte of a packed field may be a number, in a list that has just grown.
    cost_.bytes +=
        packed ? 2 * WidthOf(*field) * length : kListEntry + sizeof(std::string) + size_t{length};
    return wire_.Skip(bytes);
  }

  // So many bytes at most a number takes in a list.
  static size_t WidthOf(const FieldDescriptor& field) {
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
      case FieldDescriptor::CPPTYPE_UINT32:
      case FieldDescriptor::CPPTYPE_FLOAT:
      case FieldDescriptor::CPPTYPE_ENUM:
      case FieldDescriptor::CPPTYPE_BOOL:
        return sizeof(uint32_t);
      case FieldDescriptor::CPPTYPE_INT64:
      case FieldDescriptor::CPPTYPE_UINT64:
      case FieldDescriptor::CPPTYPE_DOUBLE:
      case FieldDescriptor::CPPTYPE_STRING:   // not numbers: of no packed list
      case FieldDescriptor::CPPTYPE_MESSAGE:  // likewise
        break;
    }
    return sizeof(uint64_t);
  }

  size_t EmptyBytes(const Descriptor* type) {
    size_t& bytes = empty_bytes_[type];
    if (bytes == 0) {
      bytes = google::protobuf::MessageFactory::generated_factory()
                  ->GetPrototype(type)
                  ->SpaceUsedLong();
    }
    return bytes;
  }

  CodedInputStream& wire_;
  const size_t max_bytes_;
  ParseCost cost_;
  std::unordered_map<const Descriptor*, size_t> empty_bytes_;
};

}  // namespace

absl::StatusOr<ParseCost> CostToParse(const Descriptor& type, size_t max_bytes,
                                      google::protobuf::io::ZeroCopyInputStream* wire) {
  CodedInputStream coded(wire);
  Walk walk(&coded, max_bytes);
  if (!walk.Add(&type, 0) && !walk.exceeded()) {
    return absl::InvalidArgumentError("the message is not well-formed");
  }
  return walk.cost();
}

}  // namespace ringleader::session
