// Links among threads: a channel is a ring of message buffers with two counters, of messages sent and taken.
#include <array>
#include <cstdlib>
#include <mutex>

#include "base/error.h"
#include "comm/member.h"

namespace whale::inproc {
namespace {

// The contiguous runs of a box inside a dense tensor, in row-major order.
class BoxRuns {
 public:
  BoxRuns(const Dims& dims, const std::vector<Interval>& box, int64_t element_bytes) : run_(element_bytes) {
    if (box.size() != dims.size() || dims.size() > static_cast<size_t>(kMaxRank))
      throw internal("a transfer's box has {} dimensions, its tensor {}", box.size(), to_string(dims));
    int64_t stride = element_bytes;
    bool whole = true;  // all dimensions so far
    for (size_t d = dims.size(); d-- > 0;) {
      if (box[d].begin < 0 || box[d].end < box[d].begin || box[d].end > dims[d])
        throw internal("a transfer takes [{}, {}) of dimension {} of {}", box[d].begin, box[d].end, d, to_string(dims));
      begin_ += box[d].begin * stride;
      if (whole)
        run_ *= box[d].size();
      else if (box[d].size() != 1)
        loops_[count_++] = {box[d].size(), stride};
      bytes_ = d + 1 == dims.size() ? element_bytes * box[d].size() : bytes_ * box[d].size();
      whole = whole && box[d].size() == dims[d];
      stride *= dims[d];
    }
    if (dims.empty()) bytes_ = element_bytes;
  }
  int64_t bytes() const { return bytes_; }
  bool is_one_run() const { return count_ == 0; }
  int64_t begin() const { return begin_; }

  template <class Body>  // body(offset in the tensor, bytes)
  void each(Body body) const {
    if (bytes_ == 0) return;
    std::array<int64_t, kMaxRank> at{};
    for (int64_t offset = begin_;;) {
      body(offset, run_);
      int d = 0;
      for (; d < count_; ++d) {
        const Loop& loop = loops_[d];
        offset += loop.stride;
        if (++at[d] < loop.extent) break;
        at[d] = 0;
        offset -= loop.extent * loop.stride;
      }
      if (d == count_) return;
    }
  }

 private:
  struct Loop {
    int64_t extent, stride;
  };
  std::array<Loop, kMaxRank> loops_{};  // innermost first
  int count_ = 0;
  int64_t begin_ = 0, run_ = 1, bytes_ = 0;
};

int64_t elements_of(const std::vector<Interval>& box) {
  int64_t n = 1;
  for (const Interval& i : box) n *= i.size();
  return n;
}

struct Release {
  void operator()(char* memory) const { std::free(memory); }
};

struct Channel {
  int32_t from = 0, to = 0;
  uint32_t capacity = 1;
  std::vector<const Transfer*> transfers;
  int64_t elements = 0;  // of a message
  DType dtype{};         // once an end is bound
  size_t stride = 0;     // bytes from place to place
  std::unique_ptr<char, Release> memory;
  Counter sent, taken;
  alignas(64) uint32_t sends = 0;  // the sender's view
  alignas(64) uint32_t takes = 0;  // the receiver's view

  char* place(uint32_t message) const { return memory.get() + message % capacity * stride; }
  void prepare(const std::string& link, DType type) {
    if (memory && dtype != type)
      throw internal("link '{}' is sent as {} and received as {}, or the other way round", link, name_of(dtype),
                     name_of(type));
    if (memory) return;
    dtype = type;
    stride = static_cast<size_t>((std::max<int64_t>(elements * size_of(type), 1) + 63) / 64 * 64);
    memory.reset(static_cast<char*>(std::aligned_alloc(64, stride * capacity)));
    if (!memory)
      throw error(Code::kResourceExhausted, "no memory for the {} messages of {} bytes of link '{}'", capacity, stride,
                  link);
  }
};

// What one device moves for one channel: of this rank's memory, or of a wire.
struct End {
  Channel* channel;
  std::vector<BoxRuns> boxes;
  std::unique_ptr<Wire::Sender> sender = {};
  std::unique_ptr<Wire::Receiver> receiver = {};
  size_t bytes = 0;  // of a message
};

class Send final : public Collective {
 public:
  Send(std::vector<End> ends, const char* data, Device& device)
      : ends_(std::move(ends)), data_(data), device_(device) {}
  bool run(Lookout* lookout) override {
    for (const End& end : ends_)
      if (!(end.sender ? send_far(end, lookout) : send_near(end, lookout))) return false;
    return true;
  }

 private:
  bool send_far(const End& end, Lookout* lookout) {
    char* to = end.sender->begin(end.bytes, lookout);
    if (to == nullptr) return false;
    write(end, to);
    end.sender->end();
    return true;
  }
  bool send_near(const End& end, Lookout* lookout) {
    Channel& c = *end.channel;
    const uint32_t message = c.sends++;
    if (message >= c.capacity && !c.taken.wait(message + 1 - c.capacity, lookout)) return false;
    write(end, c.place(message));
    c.sent.advance(1);
    return c.sent.wait(message + 1);  // false: aborted
  }
  void write(const End& end, char* to) {
    for (const BoxRuns& box : end.boxes) {
      if (!device_.has_values()) break;
      box.each([&](int64_t offset, int64_t bytes) {
        device_.copy_out(to, data_ + offset, static_cast<size_t>(bytes));
        to += bytes;
      });
    }
  }

  std::vector<End> ends_;
  const char* data_;
  Device& device_;
};

alignas(64) constexpr char kZeros[4096] = {};

class Receive final : public Collective {
 public:
  Receive(std::vector<End> ends, char* data, size_t clear_bytes, Device& device)
      : ends_(std::move(ends)), data_(data), clear_bytes_(clear_bytes), device_(device) {}
  bool run(Lookout* lookout) override {
    for (size_t at = 0; at < clear_bytes_; at += sizeof kZeros)
      device_.copy_in(data_ + at, kZeros, std::min(sizeof kZeros, clear_bytes_ - at));
    for (const End& end : ends_)
      if (!(end.receiver ? take_far(end, lookout) : take_near(end, lookout))) return false;
    return true;
  }

 private:
  bool take_far(const End& end, Lookout* lookout) {
    if (end.boxes.size() == 1 && end.boxes[0].is_one_run() && device_.in_host_memory())
      return end.receiver->take(data_ + end.boxes[0].begin(), end.bytes, lookout);
    const char* from = end.receiver->begin(end.bytes, lookout);
    if (from == nullptr) return false;
    read(end, from);
    end.receiver->end();
    return true;
  }
  bool take_near(const End& end, Lookout* lookout) {
    Channel& c = *end.channel;
    const uint32_t message = c.takes++;
    if (!c.sent.wait(message + 1, lookout)) return false;
    read(end, c.place(message));
    c.taken.advance(1);
    return true;
  }
  void read(const End& end, const char* from) {
    for (const BoxRuns& box : end.boxes)
      box.each([&](int64_t offset, int64_t bytes) {
        device_.copy_in(data_ + offset, from, static_cast<size_t>(bytes));
        from += bytes;
      });
  }

  std::vector<End> ends_;
  char* data_;
  size_t clear_bytes_;  // of the tensor, where messages do not cover it
  Device& device_;
};

class InprocLinks final : public Links {
 public:
  InprocLinks(const std::vector<Link>& links, const Abroad& abroad)
      : links_(links), abroad_(abroad), channels_(links.size()) {
    for (size_t l = 0; l < links_.size(); ++l) {
      if (links_[l].capacity < 1) throw internal("link '{}' has capacity {}", links_[l].name, links_[l].capacity);
      for (const Transfer& t : links_[l].transfers) add(l, t);
    }
  }

  std::unique_ptr<Collective> bind(int number, int device, const Operand& tensor, bool sending,
                                   Device& memory) override {
    if (number < 0 || static_cast<size_t>(number) >= links_.size())
      throw internal("an instruction names link {} of {}", number, links_.size());
    const Link& link = links_[number];
    std::vector<End> ends;
    int64_t covered = 0;
    for (const auto& channel : channels_[number]) {
      if ((sending ? channel->from : channel->to) != device) continue;
      End end{channel.get(), {}};
      if (abroad_.crosses(channel->from, channel->to)) {
        open(end, number, sending, static_cast<size_t>(channel->elements * size_of(tensor.dtype)));
      } else {
        const std::lock_guard lock(mutex_);
        channel->prepare(link.name, tensor.dtype);
      }
      for (const Transfer* t : channel->transfers)
        end.boxes.emplace_back(tensor.dims, sending ? t->source : t->target, size_of(tensor.dtype));
      covered += channel->elements;
      ends.push_back(std::move(end));
    }
    char* data = static_cast<char*>(tensor.data);
    if (sending) return std::make_unique<Send>(std::move(ends), data, memory);
    const int64_t elements = element_count(tensor.dims);
    const size_t clear = covered < elements ? static_cast<size_t>(elements * size_of(tensor.dtype)) : 0;
    return std::make_unique<Receive>(std::move(ends), data, clear, memory);
  }

  void abort() override {
    each([](Channel& c) {
      c.sent.abort();
      c.taken.abort();
    });
  }
  void reset() override {
    each([](Channel& c) {
      c.sent.reset();
      c.taken.reset();
      c.sends = c.takes = 0;
    });
  }

 private:
  void open(End& end, int link, bool sending, size_t bytes) const {
    const Channel& c = *end.channel;
    const auto rank = [&](int32_t device) { return (*abroad_.ranks)[device]; };
    // 1, 23, 20 and 20 bits; collectives have the tags without the first.
    const uint64_t tag = (uint64_t{1} << 63) | (static_cast<uint64_t>(link) << 40) |
                         (static_cast<uint64_t>(c.from) << 20) | static_cast<uint64_t>(c.to);
    end.bytes = bytes;
    if (sending)
      end.sender = abroad_.wire->open_sender(rank(c.to), tag, c.capacity, true);
    else
      end.receiver = abroad_.wire->open_receiver(rank(c.from), tag);
  }
  void add(size_t link, const Transfer& t) {
    bool fits = t.source.size() == t.target.size();
    for (size_t d = 0; fits && d < t.source.size(); ++d) fits = t.source[d].size() == t.target[d].size();
    if (!fits) throw internal("a transfer of link '{}' has boxes of two shapes", links_[link].name);
    const int64_t n = elements_of(t.source);
    if (n == 0) return;
    auto& list = channels_[link];
    auto at = std::find_if(list.begin(), list.end(), [&](const auto& c) { return c->from == t.from && c->to == t.to; });
    if (at == list.end()) {
      at = list.insert(at, std::make_unique<Channel>());
      (*at)->from = t.from;
      (*at)->to = t.to;
      (*at)->capacity = static_cast<uint32_t>(links_[link].capacity);
    }
    (*at)->transfers.push_back(&t);
    (*at)->elements += n;
  }
  template <class Body>
  void each(Body body) {
    for (auto& list : channels_)
      for (auto& channel : list) body(*channel);
  }

  const std::vector<Link> links_;
  const Abroad abroad_;
  std::vector<std::vector<std::unique_ptr<Channel>>> channels_;  // by link, in order of the first transfer
  std::mutex mutex_;                                             // of binding
};

}  // namespace
}  // namespace whale::inproc

namespace whale {

std::unique_ptr<Links> make_links(const std::vector<Link>& links, const Abroad& abroad) {
  return std::make_unique<inproc::InprocLinks>(links, abroad);
}

}  // namespace whale
