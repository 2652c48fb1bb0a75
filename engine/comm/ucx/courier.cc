// Letters as active messages of UCX, which chooses the way: shared memory inside a host, TCP or RDMA between hosts. One
// worker; threads that send or wait use it in turn, and a thread of its own makes progress where none of them does,
// asleep while nothing comes.
#include <poll.h>
#include <ucp/api/ucp.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <list>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/no_signals.h"
#include "base/read_memory.h"
#include "base/version.h"
#include "comm/courier_library.h"

namespace whale {
namespace {

constexpr unsigned kLetter = 1;              // of UCX's active messages
constexpr uint64_t kMostBytes = 1ull << 40;  // of a body: what is longer is garbage
constexpr int kTurns = 64;                   // of progress, before others have theirs
constexpr auto kFarewell = std::chrono::seconds(5);
// While letters are on the way out, some ways need to be looked at, and do not say so.
constexpr int kBusyMilliseconds = 1, kIdleMilliseconds = 100;
constexpr auto kWatch = std::chrono::milliseconds(2);  // until the thread sees that nobody waits any more

[[noreturn]] void fail(const char* what, ucs_status_t status) {
  throw error(Code::kUnavailable, "UCX cannot {}: {}. UCX_LOG_LEVEL=info says more", what, ucs_status_string(status));
}

thread_local bool carries_for_itself = false;  // in sleep(): who is woken is awake

class UcxCourier final : public Courier {
 public:
  UcxCourier(const CourierOptions& options, Receiver& receiver)
      : options_(options), receiver_(receiver), endpoints_(static_cast<size_t>(options.size)) {
    const NoSignals quiet;  // for UCX's own threads and this one
    try {
      open();
      thread_ = std::thread([this] { loop(); });
    } catch (...) {
      close();
      throw;
    }
  }
  ~UcxCourier() override {
    quit_ = true;
    rouse(true);
    thread_.join();
    close();
  }

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }

  void send(int to, const LetterHead& head, const void* body, size_t bytes, const Ticket& ticket) override {
    std::string address;
    if (!known(to)) {
      try {
        address = options_.address_of(to);
      } catch (const Error& e) {
        const std::lock_guard lock(mutex_);
        const int at_fault = e.where().rank;  // it is lost, has left, or does not come; be it that one or another
        return lose(at_fault >= 0 && at_fault < size() && at_fault != rank() ? at_fault : to, e.message());
      }
    }
    const std::lock_guard lock(mutex_);
    Endpoint& end = endpoints_[to];
    if (end.ep == nullptr && !end.lost) connect(to, address);
    if (end.lost) return;
    Out& out = free_out(end, ticket.thing == nullptr ? bytes : 0);
    out.head = head, out.ticket = ticket;
    if (ticket.thing == nullptr && bytes > 0) {
      out.body.assign(static_cast<const char*>(body), static_cast<const char*>(body) + bytes);
      body = out.body.data();
    }
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.send = [](void* request, ucs_status_t, void* data) {
      auto* out = static_cast<Out*>(data);
      ucp_request_free(request);
      out->courier->sent(*out);
    };
    param.user_data = &out;
    if (head.kind != LetterHead::kMessage) {
      param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
      param.flags = UCP_AM_SEND_FLAG_EAGER;
    }
    void* request = ucp_am_send_nbx(end.ep, kLetter, &out.head, sizeof out.head, body, bytes, &param);
    if (request == nullptr) return sent(out);
    if (UCS_PTR_IS_ERR(request)) {
      sent(out);
      return told(to, UCS_PTR_STATUS(request));
    }
    if (waiting_ == 0)
      rouse(true);
    else if (asleep_ > 0)  // who waits carries it
      ucp_worker_signal(worker_);
  }

  bool lends_to(int rank) const override { return endpoints_[rank].reads_here; }
  bool read(int rank, uint64_t address, char* place, size_t bytes) override {
    const pid_t process = options_.readable[rank];
    return process != 0 && read_memory(process, address, place, bytes);
  }

  void give_up(int rank) override {
    const std::lock_guard lock(mutex_);
    endpoints_[rank].lost = true;
  }

  void wait_begins() override { ++waiting_; }
  void poll() override {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock) progress();
  }
  bool sleeps() const override { return true; }
  void sleep_begins() override { ++asleep_; }
  void sleep(int milliseconds) override {
    {
      const std::lock_guard lock(mutex_);
      carries_for_itself = true;
      const bool any = progress();
      carries_for_itself = false;
      if (any || ucp_worker_arm(worker_) == UCS_ERR_BUSY) return;
      // Of several that sleep one may take the signal that was meant for another.
      if (!outs_.empty() || !ins_.empty() || asleep_ > 1) milliseconds = std::min(milliseconds, kBusyMilliseconds);
    }
    pollfd event{event_, POLLIN, 0};
    ::poll(&event, 1, milliseconds);
  }
  void sleep_ends() override { --asleep_; }
  void wake() noexcept override {
    if (asleep_ > (carries_for_itself ? 1 : 0)) ucp_worker_signal(worker_);
  }
  void wait_ends() override {
    const bool last = --waiting_ == 0;
    if (last && (listens_ || unfinished_)) rouse(unfinished_);
    if (!last && unfinished_ && asleep_ > 0) ucp_worker_signal(worker_);
  }
  void listen() noexcept override {
    listens_ = true;
    if (waiting_ == 0) rouse(false);
  }

 private:
  struct Endpoint {
    ucp_ep_h ep = nullptr;
    bool lost = false;
    std::atomic<bool> reads_here{false};  // it can read this one's memory
    size_t under_way = 0;                 // letters
    UcxCourier* courier = nullptr;
    int rank = 0;
  };
  // A letter on its way out.
  struct Out {
    UcxCourier* courier = nullptr;
    Endpoint* end = nullptr;
    LetterHead head;
    std::vector<char> body;
    Ticket ticket;
  };
  struct In {  // a large one on its way in
    UcxCourier* courier = nullptr;
    Ticket ticket;
    int from = 0;
  };

  void open() {
    ucp_config_t* config = nullptr;
    ucs_status_t status = ucp_config_read("WHALE", nullptr, &config);
    if (status != UCS_OK) fail("read its settings", status);
    // Where all are on one host nothing listens to a network.
    const bool one_host = std::all_of(options_.near.begin(), options_.near.end(), [](bool near) { return near; });
    if (one_host && std::getenv("UCX_TLS") == nullptr)  // NOLINT(concurrency-mt-unsafe)
      status = ucp_config_modify(config, "TLS", "sm,self");
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS;
    params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
    params.estimated_num_eps = static_cast<size_t>(options_.size);
    if (status == UCS_OK) status = ucp_init(&params, config, &context_);
    ucp_config_release(config);
    if (status != UCS_OK) fail("begin", status);
    ucp_worker_params_t worker{};
    worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
    if (status = ucp_worker_create(context_, &worker, &worker_); status != UCS_OK)
      fail(one_host ? "make a worker (is /dev/shm large enough? some MB a process)" : "make a worker", status);
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                         UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = kLetter;
    handler.flags = UCP_AM_FLAG_WHOLE_MSG;
    handler.cb = [](void* self, const void* head, size_t head_bytes, void* data, size_t bytes,
                    const ucp_am_recv_param_t* param) {
      return static_cast<UcxCourier*>(self)->came(head, head_bytes, data, bytes, *param);
    };
    handler.arg = this;
    if (status = ucp_worker_set_am_recv_handler(worker_, &handler); status != UCS_OK) fail("take messages", status);
    if (status = ucp_worker_get_efd(worker_, &event_); status != UCS_OK) fail("wake a thread", status);
    ucp_address_t* address = nullptr;
    size_t bytes = 0;
    if (status = ucp_worker_get_address(worker_, &address, &bytes); status != UCS_OK) fail("say its address", status);
    std::string text(reinterpret_cast<const char*>(address), bytes);
    ucp_worker_release_address(worker_, address);
    for (const pid_t process : options_.readable) text += process != 0 ? 'y' : 'n';  // whose memory is read from here
    options_.publish(std::move(text));
  }

  // Letters that were sent go on for a while; a rank that does not take them any more is not waited for. Of one that
  // has left the shared memory may be full for ever.
  void close() {
    const auto end = std::chrono::steady_clock::now() + kFarewell;
    std::vector<std::pair<int, void*>> closing;  // rank, request
    if (worker_ != nullptr) {
      const std::lock_guard lock(mutex_);
      const auto wait = [&](auto done) {
        while (!done() && std::chrono::steady_clock::now() < end) ucp_worker_progress(worker_);
      };
      const auto is_through = [&](const Endpoint& e) {
        return e.lost || e.under_way == 0 || options_.has_left(e.rank);
      };
      wait([&] { return std::all_of(endpoints_.begin(), endpoints_.end(), is_through); });
      const auto is_cut_off = [&](const Endpoint& e) {
        return e.ep != nullptr && (e.lost || e.under_way > 0) && !options_.near[e.rank];
      };
      // UCX 1.13 ends the process where an endpoint goes that has a letter half way to a rank that is cut off, or from
      // it: then all stays as it is, and nobody looks at it any more.
      if (!ins_.empty() || std::any_of(endpoints_.begin(), endpoints_.end(), is_cut_off)) {
        worker_ = nullptr, context_ = nullptr;
        return;
      }
      for (Endpoint& e : endpoints_) {
        if (e.ep == nullptr) continue;
        ucp_request_param_t param{};
        param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
        const bool gone = e.lost || options_.has_left(e.rank);
        const bool by_force = gone && !options_.near[e.rank];
        param.flags = by_force ? UCP_EP_CLOSE_FLAG_FORCE : 0;
        if (gone && !by_force) continue;  // it would wait for the other end
        void* request = ucp_ep_close_nbx(e.ep, &param);
        if (UCS_PTR_IS_PTR(request)) closing.emplace_back(e.rank, request);
      }
      wait([&] {
        return std::all_of(closing.begin(), closing.end(), [&](const auto& c) {
          return ucp_request_check_status(c.second) != UCS_INPROGRESS || options_.has_left(c.first);
        });
      });
      for (const auto& [rank, request] : closing) ucp_request_free(request);
      ucp_worker_destroy(worker_);
      worker_ = nullptr;
    }
    if (context_ != nullptr) ucp_cleanup(context_);
    context_ = nullptr;
  }

  bool known(int to) {
    const std::lock_guard lock(mutex_);
    const Endpoint& end = endpoints_[to];
    return end.ep != nullptr || end.lost;
  }

  // Under the lock, as what follows.
  void connect(int to, const std::string& address) {
    Endpoint& end = endpoints_[to];
    end.courier = this, end.rank = to;
    ucp_ep_params_t params{};
    params.field_mask =
        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.address = reinterpret_cast<const ucp_address_t*>(address.data());
    // Shared memory does not notice that the other process has ended. The meeting does (world/meeting.h).
    params.err_mode = options_.near[to] ? UCP_ERR_HANDLING_MODE_NONE : UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.cb = [](void* of, ucp_ep_h, ucs_status_t status) {
      auto* end = static_cast<Endpoint*>(of);
      end->courier->told(end->rank, status);
    };
    params.err_handler.arg = &end;
    if (const ucs_status_t status = ucp_ep_create(worker_, &params, &end.ep); status != UCS_OK) {
      end.ep = nullptr;
      return told(to, status);
    }
    const auto ranks = static_cast<size_t>(options_.size), mine = static_cast<size_t>(options_.rank);
    end.reads_here = address.size() > ranks && address[address.size() - ranks + mine] == 'y';
  }

  // With room for a body that is copied.
  Out& free_out(Endpoint& end, size_t bytes) {
    if (spare_.empty()) {
      spare_.emplace_back();
      spare_.back().courier = this;
    }
    spare_.front().body.reserve(bytes);
    outs_.splice(outs_.end(), spare_, spare_.begin());
    unfinished_ = true;
    outs_.back().end = &end;
    ++end.under_way;
    return outs_.back();
  }
  void sent(Out& out) {
    --out.end->under_way;
    const Ticket ticket = std::move(out.ticket);
    out.ticket = {};
    const auto at = std::find_if(outs_.begin(), outs_.end(), [&](const Out& o) { return &o == &out; });
    spare_.splice(spare_.begin(), outs_, at);
    unfinished_ = !outs_.empty() || !ins_.empty();
    if (ticket.thing != nullptr) receiver_.sent(ticket);
  }

  ucs_status_t came(const void* data, size_t head_bytes, void* body, size_t bytes, const ucp_am_recv_param_t& param) {
    LetterHead head;
    if (head_bytes != sizeof head || bytes > kMostBytes) return UCS_OK;
    std::memcpy(&head, data, sizeof head);
    if (head.from >= static_cast<uint32_t>(options_.size)) return UCS_OK;
    const int from = static_cast<int>(head.from);
    const bool large = (param.recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    char* place = nullptr;
    Ticket letter;
    try {
      letter = receiver_.accept(head, bytes, place);
      if (large && spare_ins_.empty()) spare_ins_.emplace_back();
    } catch (const std::bad_alloc&) {
      lose(from, "there is no memory for a message from another rank");
      letter = {};
    }
    if (letter.thing == nullptr) return UCS_OK;
    if (!large) {
      if (bytes > 0) std::memcpy(place, body, bytes);
      receiver_.arrived(letter);
      return UCS_OK;
    }
    ins_.splice(ins_.end(), spare_ins_, spare_ins_.begin());
    unfinished_ = true;
    In& in = ins_.back();
    in = {this, std::move(letter), from};
    ucp_request_param_t fetch{};
    fetch.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    fetch.cb.recv_am = [](void* request, ucs_status_t status, size_t, void* data) {
      auto* in = static_cast<In*>(data);
      ucp_request_free(request);
      in->courier->fetched(*in, status);
    };
    fetch.user_data = &in;
    void* request = ucp_am_recv_data_nbx(worker_, body, place, bytes, &fetch);
    if (UCS_PTR_IS_ERR(request)) fetched(in, UCS_PTR_STATUS(request));
    return UCS_INPROGRESS;
  }
  void fetched(In& in, ucs_status_t status) {
    const Ticket letter = std::move(in.ticket);
    const int from = in.from;
    in.ticket = {};
    const auto at = std::find_if(ins_.begin(), ins_.end(), [&](const In& i) { return &i == &in; });
    spare_ins_.splice(spare_ins_.begin(), ins_, at);
    unfinished_ = !outs_.empty() || !ins_.empty();
    if (status == UCS_OK)
      receiver_.arrived(letter);
    else
      told(from, status);
  }

  void told(int rank, ucs_status_t status) {
    Endpoint& end = endpoints_[rank];
    if (std::exchange(end.lost, true)) return;
    const std::string why = fmt::format("UCX says of the connection to it: {}", ucs_status_string(status));
    if (!options_.doubt(rank, why)) lose(rank, fmt::format("rank {} is lost: {}", rank, why));
  }
  void lose(int rank, const std::string& why) {
    if (std::exchange(endpoints_[rank].lost, true)) return;
    receiver_.lost(rank, why);
  }

  bool progress() {
    int turn = 0;
    while (turn < kTurns && ucp_worker_progress(worker_) != 0) ++turn;
    return turn > 0;
  }
  // The thread has something to do; `now`: also where it is asleep until something comes.
  void rouse(bool now) noexcept {
    if (dozes_) {
      { const std::lock_guard lock(roused_mutex_); }
      roused_.notify_one();
    } else if (now) {
      ucp_worker_signal(worker_);
    }
  }

  void loop() {
    while (!quit_) {
      if (waiting_ > 0) {  // they do it
        std::unique_lock lock(roused_mutex_);
        dozes_ = true;
        roused_.wait_for(lock, kWatch, [&] { return waiting_ == 0 || quit_; });
        dozes_ = false;
        continue;
      }
      listens_ = false;
      int wait = kIdleMilliseconds;
      {
        const std::lock_guard lock(mutex_);
        progress();
        if (ucp_worker_arm(worker_) == UCS_ERR_BUSY) wait = 0;
        if (wait != 0 && (!outs_.empty() || !ins_.empty())) wait = kBusyMilliseconds;
      }
      pollfd event{event_, POLLIN, 0};
      if (wait == 0)
        std::this_thread::yield();  // others send
      else
        ::poll(&event, 1, wait);
    }
  }

  const CourierOptions options_;
  Receiver& receiver_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_ = -1;
  std::mutex mutex_;  // of all below
  std::vector<Endpoint> endpoints_;
  std::list<Out> outs_, spare_;
  std::list<In> ins_, spare_ins_;
  std::atomic<bool> unfinished_{false};  // outs_ or ins_ has one
  // Threads in wait_begins() .. wait_ends(), in sleep_begins() .. sleep_ends(); somebody else waits for a notice.
  std::atomic<int> waiting_{0}, asleep_{0};
  std::atomic<bool> listens_{false}, dozes_{false};
  std::mutex roused_mutex_;
  std::condition_variable roused_;
  std::atomic<bool> quit_{false};
  std::thread thread_;
};

std::unique_ptr<Courier> create(const CourierOptions& options, Courier::Receiver& receiver) {
  return std::make_unique<UcxCourier>(options, receiver);
}

}  // namespace
}  // namespace whale

extern "C" __attribute__((visibility("default"))) const whale::CourierEntry whale_courier;
extern "C" const whale::CourierEntry whale_courier{whale::kVersion, whale::create};
