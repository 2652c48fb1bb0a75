#include "comm/messages.h"

#include <algorithm>

namespace whale {
namespace {

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
    : device_(seat.device),
      own_from_(seat.device, sends[seat.rank]),
      own_to_(seat.device, receives[seat.rank]),
      own_(own_from_.flat != nullptr && own_to_.flat != nullptr ? 0 : own_from_.bytes) {
  for (size_t k = 1; k < seat.size(); ++k) {
    const size_t to = seat.after(k), from = seat.after(seat.size() - k);
    if (Piece piece(device_, sends[to]); piece.bytes > 0)
      sends_.push_back({std::move(piece), seat.to(to, capacity(bytes_of(receives[to]) > 0))});
    if (Piece piece(device_, receives[from]); piece.bytes > 0)
      receives_.push_back({std::move(piece), {}, seat.from(from)});
  }
}

bool Messages::run(Lookout* lookout) {
  for (End& end : sends_)
    if (!send(*end.sender, device_, end.piece, lookout)) return false;
  if (own_.empty() && own_from_.flat != own_to_.flat) {
    device_.copy_in(own_to_.flat, own_from_.flat, own_to_.bytes);
  } else if (!own_.empty()) {
    pack(device_, own_from_.runs, own_.data());
    unpack(device_, own_.data(), own_to_.runs);
  }
  for (End& end : receives_)
    if (!receive(*end.receiver, device_, end.piece, lookout)) return false;
  for (End& end : sends_)
    if (!end.sender->settle(lookout)) return false;
  return true;
}

}  // namespace whale
