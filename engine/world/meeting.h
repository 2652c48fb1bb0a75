// Where the ranks of a job meet: rank 0 listens, all connect to it, and stay connected. A store of keys and values, and
// who is still there. What is said here is short; the plan's bytes go over a courier.
//
// A connection says the job's token before anything else; who does not know it within some seconds is cut off, and is
// told so where it speaks as a rank does. The ranks say "here" in turn, from a thread of their own. A rank whose
// connection ends without a farewell, or that is silent for `timeout_seconds`, is lost: all others hear it, and what it
// said last that it was at.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "world/world.h"

namespace whale {

struct MeetingOptions {
  int rank = 0, size = 1;
  // Of rank 0, as all ranks reach it; rank 0 listens on it and nowhere else. Where it is this host's name, which the
  // host itself takes for a loopback address, it listens on all.
  std::string address = "127.0.0.1";
  uint16_t port = 0;
  std::string token;            // of the job; empty: any process that reaches the port may join
  double timeout_seconds = 30;  // of a rank that is silent, and of one that does not come
  std::string self = {};        // who this is, for messages: "host 'a', process 17"
  std::function<void(int rank, const std::string& why)> lost = {};  // on a thread of the meeting's; once a rank
  // What this rank is at, for the others when it is lost; asked each time that it says "here", on a thread of the
  // meeting's. Null: nobody knows.
  std::function<std::string()> at = {};
};

class MeetingStore : public Store {
 public:
  // This rank does not reach that one any more. It may be lost, or have ended because another is, which is heard soon:
  // all are told that it is lost, for this reason, where no rank is within the timeout less `seconds`, and the
  // doubt still stands then (null: it does; called under a lock). False: the meeting is over and says nothing. Calls
  // nobody.
  virtual bool doubt(int rank, const std::string& why, double seconds = 0, std::function<bool()> stands = {}) = 0;
  // What the others are told for whom this rank's end comes too early. Calls nobody.
  virtual void leaves_for(const Error& why) = 0;
  virtual size_t turned_away() const = 0;  // connections, for their token; on other ranks than 0 none is known of
  virtual bool has_left(int rank) = 0;  // it has said farewell, as far as is known: it neither sends nor takes anything
};

// Connects; at rank 0 it listens too, until its end. Throws unavailable, deadline_exceeded,
// unauthenticated, and Stopped (base/watch.h).
std::shared_ptr<MeetingStore> meet(const MeetingOptions& options);

}  // namespace whale
