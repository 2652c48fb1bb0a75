#include "comm/messages.h"

#include <algorithm>

namespace whale {
namespace {

// Of a long message. Large enough that a letter costs little beside it; while one is read others are on their way.
constexpr size_t kChunk = 1 << 20;
constexpr uint32_t kUnderWay = 4;
constexpr size_t kBlock = 256 << 10;

void append(std::vector<Strided>& list, const Strided& run) {
  if (run.bytes() == 0) return;
  if (!list.empty()) {
    Strided& last = list.back();
    if (last.count == 1 && run.count == 1 && last.data + last.begin + last.run == run.data + run.begin) {
      last.run += run.run;
      return;
    }
  }
  list.push_back(run);
}

}  // namespace

Piece::Piece(const Device& device, std::vector<Strided> list) : bytes(bytes_of(list)) {
  for (Strided& run : list) {
    if (run.count > 1 && run.stride == run.run) run = {run.data, run.begin, run.bytes(), 0, 1};
    append(runs, run);
  }
  if (runs.size() == 1 && runs[0].count == 1 && device.in_host_memory()) flat = runs[0].data + runs[0].begin;
}

Piece Piece::copied() const {
  Piece out = *this;
  out.flat = nullptr;
  return out;
}

std::vector<Strided> slice(const std::vector<Strided>& packed, size_t begin, size_t end) {
  std::vector<Strided> out;
  size_t at = 0;  // of the list
  for (const Strided& s : packed) {
    size_t from = std::clamp(begin, at, at + s.bytes()) - at;
    const size_t to = std::clamp(end, at, at + s.bytes()) - at;
    at += s.bytes();
    while (from < to) {
      const size_t row = from / s.run, in_row = from % s.run;
      const size_t rows = in_row == 0 ? (to - from) / s.run : 0;  // whole ones
      if (rows > 0)
        append(out, {s.data, s.begin + row * s.stride, s.run, s.stride, rows});
      else
        append(out, {s.data, s.begin + row * s.stride + in_row, std::min(s.run - in_row, to - from), 0, 1});
      from += rows > 0 ? rows * s.run : std::min(s.run - in_row, to - from);
    }
  }
  return out;
}

std::vector<Piece> chunks_of(const Device& device, const std::vector<Strided>& list, size_t most) {
  std::vector<Piece> out;
  const size_t bytes = bytes_of(list);
  for (size_t at = 0; at < bytes; at += most) out.emplace_back(device, slice(list, at, std::min(at + most, bytes)));
  return out;
}

bool send(Wire::Sender& sender, Device& device, const Piece& piece, Lookout* lookout) {
  if (piece.flat != nullptr) return sender.lend(piece.flat, piece.bytes, lookout);
  char* to = sender.begin(piece.bytes, lookout);
  if (to == nullptr) return false;
  pack(device, piece.runs, to);
  sender.end();
  return true;
}

bool receive(Wire::Receiver& receiver, Device& device, const Piece& piece, Lookout* lookout) {
  if (piece.flat != nullptr) return receiver.take(piece.flat, piece.bytes, lookout);
  const char* from = receiver.begin(piece.bytes, lookout);
  if (from == nullptr) return false;
  unpack(device, from, piece.runs);
  receiver.end();
  return true;
}

std::unique_ptr<Wire::Sender> Seat::to(size_t member, uint32_t capacity, Lane lane) const {
  return wire.open_sender(rank_of(member), tag(rank, member, lane), capacity, true);
}
std::unique_ptr<Wire::Receiver> Seat::from(size_t member, Lane lane) const {
  return wire.open_receiver(rank_of(member), tag(member, rank, lane));
}

Messages::Messages(const Seat& seat, const Pieces& sends, const Pieces& receives)
    : device_(seat.device), own_from_(sends[seat.rank]), own_to_(receives[seat.rank]) {
  if (!device_.in_host_memory()) block_.resize(std::min(bytes_of(own_from_), kBlock));
  const auto add = [&](std::vector<End>& ends, const std::vector<Strided>& list) -> End* {
    std::vector<Piece> chunks = chunks_of(device_, list, kChunk);
    if (chunks.empty()) return nullptr;
    chunks_ = std::max(chunks_, chunks.size());
    return &ends.emplace_back(End{std::move(chunks)});
  };
  for (size_t k = 1; k < seat.size(); ++k) {
    const size_t to = seat.after(k), from = seat.after(seat.size() - k);
    if (End* end = add(sends_, sends[to]))
      end->sender = seat.to(to, end->chunks.size() > 1 ? kUnderWay : capacity(bytes_of(receives[to]) > 0));
    if (End* end = add(receives_, receives[from])) end->receiver = seat.from(from);
  }
}

bool Messages::run(Lookout* lookout) {
  for (size_t c = 0; c <= chunks_; ++c) {  // one ahead
    for (End& end : sends_)
      if (c < end.chunks.size() && !send(*end.sender, device_, end.chunks[c], lookout)) return false;
    if (c == 0) {
      copy(device_, own_from_, own_to_, block_);
      continue;
    }
    for (End& end : receives_)
      if (c <= end.chunks.size() && !receive(*end.receiver, device_, end.chunks[c - 1], lookout)) return false;
  }
  for (End& end : sends_)
    if (!end.sender->settle(lookout)) return false;
  return true;
}

}  // namespace whale
