// What a member of a group between ranks sends and receives: pieces of its device's memory, packed where they are not
// one run that the host can reach.
#pragma once

#include <memory>
#include <vector>

#include "comm/strided.h"
#include "comm/wire.h"

namespace whale {

struct Piece {
  std::vector<Strided> runs = {};
  size_t bytes = 0;
  char* flat = nullptr;  // where it is one run in the host's memory

  Piece() = default;
  Piece(const Device& device, std::vector<Strided> list);
  Piece copied() const;  // the same, always packed: what may be written again before others have read it
};

// Bytes [begin, end) of what lies packed.
std::vector<Strided> slice(const std::vector<Strided>& packed, size_t begin, size_t end);
// All of them, `most` bytes in each piece but the last.
std::vector<Piece> chunks_of(const Device& device, const std::vector<Strided>& list, size_t most);

// The next message of a channel. false: aborted.
bool send(Wire::Sender& sender, Device& device, const Piece& piece, Lookout* lookout);
bool receive(Wire::Receiver& receiver, Device& device, const Piece& piece, Lookout* lookout);

// Who a member is, and what it reaches the others by.
struct Seat {
  const std::vector<int32_t>& devices;  // of the part of the group
  size_t rank = 0;                      // in it
  int32_t group = 0;
  Device& device;
  Wire& wire;
  const std::vector<int32_t>& ranks;  // of all devices of the plan

  size_t size() const { return devices.size(); }
  size_t after(size_t steps) const { return (rank + steps) % size(); }  // so that not all begin with the same one
  // Two channels between two members. `capacity` as open_sender's.
  enum Lane : uint64_t { kFirst, kResults };
  std::unique_ptr<Wire::Sender> to(size_t member, uint32_t capacity, Lane lane = kFirst) const;
  std::unique_ptr<Wire::Receiver> from(size_t member, Lane lane = kFirst) const;

 private:
  int rank_of(size_t member) const { return ranks[devices[member]]; }
  uint64_t tag(size_t from, size_t to, Lane lane) const {  // 1, 1, 22, 20 and 20 bits; the first is that of links
    return (lane << 62) | (static_cast<uint64_t>(group) << 40) | (static_cast<uint64_t>(devices[from]) << 20) |
           static_cast<uint64_t>(devices[to]);
  }
};

using Pieces = std::vector<std::vector<Strided>>;  // by member; what no byte is of sends no message

// Messages that are paced by those that come back; others have room for as many.
inline uint32_t capacity(bool comes_back) { return comes_back ? 0 : 2; }

// What each member has for each other. Long ones go in chunks: what is packed, or copied on its way, takes as much
// memory as some chunks, however much goes.
class Messages {
 public:
  Messages(const Seat& seat, const Pieces& sends, const Pieces& receives);
  bool run(Lookout* lookout);  // what comes is in place, and what was sent may be written again; false: aborted

 private:
  struct End {
    std::vector<Piece> chunks;
    std::unique_ptr<Wire::Sender> sender = {};
    std::unique_ptr<Wire::Receiver> receiver = {};
  };
  Device& device_;
  std::vector<End> sends_, receives_;
  size_t chunks_ = 0;  // of the longest
  std::vector<Strided> own_from_, own_to_;
  std::vector<char> block_;  // what the host does not reach goes through it
};

}  // namespace whale
